"""Names that become paths, and folders that are removed."""

from pathlib import Path

import pytest

from assay.errors import ConfigError
from assay.support.names import check_name, is_name, is_within, place_in
from assay.support.places import MARKER, check_claimable, claim_folder, remove_folder

BAD = [
    "", ".", "..", "../x", "../../victim", "a/b", "/etc", "a/", "/", "a\\b", "..\\x", "C:x", "c:", "a\0b", "a\nb",
    "a\tb", "a\x1b[2J", "a\x7f", "a\x9b", ".hidden", "-rf", "--name", " a", "a ", "a.", "..a", "...", "x" * 201,
    "é" * 101, "con", "NUL", "aux.txt", "Com1", "LPT9.log", "a\u2215b", "a\u2044b", "a\uff0fb", "a\uff3cb", "\u2025",
    "\uff0e\uff0e", "\u202ea", "a\u2066b", "a\u200eb", "a\ud800", None, 5, b"a", ["a"],
]  # fmt: skip
GOOD = [
    "a", "my run", "v1.2", "a..b", "über", "数学", "بحث", "a_b-c", "x" * 200, "a+b", "a@1", "100%", "console", "~a",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_what_is_no_name_is_refused(name: object, tmp_path: Path) -> None:
    for plain in (False, True):
        with pytest.raises(ConfigError, match=r"^run="):
            check_name(name, "run", plain=plain)
    with pytest.raises(ConfigError):
        place_in(tmp_path, name)


@pytest.mark.parametrize("name", GOOD)
def test_a_name_is_one_file_in_its_folder(name: str, tmp_path: Path) -> None:
    place = place_in(tmp_path, name)
    place.write_text("x")
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert place_in(tmp_path, name, ending=".json").parent == tmp_path


@pytest.mark.parametrize(
    ("name", "plain"), [("a b", False), ("é", False), ("x" * 64, False), ("a+b", False), ("x" * 63, True)]
)
def test_a_plain_name_is_a_part_of_other_names(name: str, plain: bool) -> None:
    assert is_name(name)
    assert is_name(name, plain=True) == plain


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "a").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="symbolic link"):
        place_in(tmp_path / "home", "a")


@pytest.mark.parametrize("place", ["a.py", "a/b.py", ".env", "a b/-x", "a/.b/c", "./a", "über/é.txt", "a..b/c."])
def test_a_path_within_a_folder(place: str) -> None:
    assert is_within(place)


@pytest.mark.parametrize(
    "place",
    ["", ".", "/", "/a", "..", "a/../../b", "../a", "a\0", "a\n", "a\\b", "..\\a", "C:/a", "a/c:x", "\ud800", None],
)
def test_a_path_that_may_lead_out_of_a_folder(place: object) -> None:
    assert not is_within(place)


def test_a_job_removes_only_what_it_has_made(tmp_path: Path) -> None:
    own, others, users = tmp_path / "own", tmp_path / "others", tmp_path / "users"
    claim_folder(own, "job a")
    (own / "inner").mkdir()
    (own / "inner" / "file").touch()
    claim_folder(others, "job b")
    users.mkdir()
    (users / "thesis").touch()
    for folder in (own, others, users, tmp_path / "missing"):
        remove_folder(folder, "job a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["others", "users"]
    assert (users / "thesis").is_file()


@pytest.mark.parametrize("where", ["folder", "above", "marker"])
def test_nothing_is_removed_behind_a_link(where: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    claim_folder(victim / "sub", "job a")
    (victim / "sub" / "thesis").touch()
    target = tmp_path / "own"
    if where == "folder":
        target.symlink_to(victim / "sub")
    elif where == "above":
        (victim / "sub" / MARKER).unlink()
        (victim / MARKER).write_text("job a")
        target.symlink_to(victim)
        target = target / "sub"
    else:
        target = victim / "sub"
        (target / MARKER).rename(tmp_path / "marker")
        (target / MARKER).symlink_to(tmp_path / "marker")
    remove_folder(target, "job a")
    assert (victim / "sub" / "thesis").is_file()


@pytest.mark.parametrize("content", ["files", "another job", "file", "link"])
def test_a_folder_of_others_is_not_claimed(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    if content == "files":
        folder.mkdir()
        (folder / "thesis").touch()
    elif content == "another job":
        claim_folder(folder, "job b")
    elif content == "file":
        folder.touch()
    else:
        folder.symlink_to(tmp_path / "nowhere")
    before = sorted(map(str, tmp_path.rglob("*")))
    for call in (check_claimable, claim_folder):
        with pytest.raises(ConfigError):
            call(folder, "job a")
    assert sorted(map(str, tmp_path.rglob("*"))) == before
