"""The page `reference/shipped.md`: programs, rubrics, judges and data that have a name."""

import inspect

from reference_text import cell

# The options are checked against the code by `tests/test_docs.py`.
DATA = {
    "FILE.jsonl": "also `.ndjson`, `.csv`, `.tsv`, `.parquet`",
    "hf:ORG/NAME:CONFIG:SPLIT": "a data set of the Hugging Face hub",
    "reasoning_gym:NAME?size=&seed=": "tasks of the package `reasoning-gym`, with its own options too",
    "arithmetic:terms=2-3&digits=2-3&ops=+-*&size=&seed=": "sums with numbers of these lengths",
    "mutants:MODULE?size=&seed=&isolation=": "functions with one mutation each, to be repaired, such as "
    "`mutants:textwrap`. Also a package, a file, a folder, or `stdlib`",
    "bfcl:CATEGORY?size=&seed=&path=": "tasks of the Berkeley Function Calling Leaderboard, such as `bfcl:multiple`",
    "tools:STAGE?size=&seed=": "tasks of a stage of the curriculum `tool_use`",
    "documents:facts?size=&seed=&passages=&removed=": "questions about documents; in a share of them the passage with "
    "the answer is removed",
    "conversations:?facts=9-11&changes=&meeting=&size=&seed=": "conversations with a simulated user that fill a form",
    "nim:size=&seed=&sticks=5-15&most=&skill=": "games of Nim against an opponent",
    "experiment:size=&seed=&trials=&noise=": "experiments with noisy outcomes",
    "curriculum:FILE": "the tasks of all stages of a curriculum",
}


def shipped_page() -> str:
    from assay.judges.loading import load_judge
    from assay.programs.loading import SHIPPED as programs, program_class
    from assay.rubrics import load_rubric
    from assay.rubrics.code import RULES
    from assay.rubrics.loading import SHIPPED as rubrics, SHIPPED_JUDGES
    from assay.shipped.programs.tool_user.bfcl import CATEGORIES

    data = [f"| `{spec}` | {cell(text)} |" for spec, text in DATA.items()]
    named = []
    for name in programs:
        owner = program_class(name)
        first = cell((inspect.getdoc(owner) or "").partition("\n")[0])
        named.append(f"| `{name}` | `assay.programs.{owner.__name__}` | {first} |")
    criteria = [
        f"| `{name}` | `{criterion.name}` | {criterion.weight:g} | {criterion.scope} | {cell(criterion.when or '')} |"
        for name in rubrics
        for criterion in load_rubric(name).criteria
    ]
    judges = []
    for name in SHIPPED_JUDGES:
        spec = load_judge(name).spec
        judges.append(f"| `{name}` | {cell(spec.text)} | {', '.join(spec.scale)} |")
    rules = [
        f"| `{name}` | {cell(rule.message.replace('{!r}', '…').replace('{}', '…'))} |" for name, rule in RULES.items()
    ]
    categories = ", ".join(f"`{name}`" for name in CATEGORIES)
    return "\n".join(
        [
            "# Shipped names\n",
            "## Programs\n",
            *("`assay evaluate NAME`.\n", "| name | class | what it does |", "|---|---|---|", *named, ""),
            "## Rubrics\n",
            *(
                "`--rubric NAME`.\n",
                "| rubric | criterion | weight | scope | when |",
                "|---|---|---|---|---|",
                *criteria,
                "",
            ),
            "## Judges\n",
            "`judge: {use: NAME}` in a rubric, `assay judge score NAME`. How far each agrees with people: their "
            "cards in [judges/README.md](../../judges/README.md).\n",
            *("| judge | question | scale |", "|---|---|---|", *judges, ""),
            "## Data\n",
            *("`--data SPEC`.\n", "| spec | tasks |", "|---|---|", *data, ""),
            f"The categories of `bfcl:` are {categories}; `simple` is `simple_python`.\n",
            "## Rules of no_hacks\n",
            "Of the check `no_hacks` and of `assay.rubrics.code.find_hacks`.\n",
            *("| rule | found |", "|---|---|", *rules, ""),
        ]
    )
