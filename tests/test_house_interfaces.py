"""Rules of the public functions: each command has its module in `api`, and no function takes untyped options."""

from pathlib import Path

import assay

SOURCE = Path(assay.__file__).parent
WITHOUT_API = {"runs", "trust", "view"}  # they read the store, the list of trusted files, and the local page alone


def test_a_command_has_a_module_of_its_name_in_api() -> None:
    """Also the commands of `judge`. The other groups are packages or modules that the documentation names."""
    shared = {"flags", "main", "numbers", "options", "repeat", "shared", "wording"}
    commands = {
        path.stem for path in (SOURCE / "cli").iterdir() if path.stem not in {*shared, "__init__", "__pycache__"}
    }
    assert commands - WITHOUT_API <= {path.stem for path in (SOURCE / "api").iterdir()}
    judges = {path.stem for path in (SOURCE / "cli" / "judge").glob("*.py")} - {"__init__", "tables"}
    assert judges <= {path.stem for path in (SOURCE / "api" / "judge").glob("*.py")}
