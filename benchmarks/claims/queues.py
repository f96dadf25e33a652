"""Lines a person writes for a classifier of many classes: a hand-written prompt, and the shipped `classify` compiled.

Messages to a shop go to one of 24 queues, by a house rule that no model can know: each kind of goods has its queue. A
prompt has to name all of them. `queues_prompt.txt` has one worked example for each. In a trial on 24 val tasks of
another seed it had 12 % right, half of its examples and a table of 24 lines as instructions 8 %, as much as no prompt.

Counting rule as in `claims.hand_written`: lines that are not empty. Program and rubric are shipped with the package, so
that a person writes the command. Data are not counted.
"""

import random
from pathlib import Path
from typing import Any

import assay
from assay.programs import Classify
from claims.hand_written import code_lines
from claims.storing import Lines, Measured, Setting

PROMPT = Path(__file__).parent / "queues_prompt.txt"
COMMAND = "assay compile classify --rubric classify --data DATA --prompt-format lean --set temperature=0.1"


def words(text: str) -> list[str]:
    return text.split()


QUEUE_OF = dict(
    zip(
        words(
            "lamp sofa kettle bicycle tent guitar camera blanket ladder printer mirror jacket "
            "clock drill piano scarf router stove canoe globe razor violin helmet puzzle"
        ),
        words(
            "oak elm pine fir ash yew birch maple cedar willow holly hazel alder aspen beech cherry "
            "larch linden poplar rowan spruce walnut juniper olive"
        ),
        strict=True,
    )
)
WORDINGS = (
    "The {goods} that I bought in {city} does not work.",
    "Where is my {goods}? It was sent from {city}.",
    "Please cancel the order of a {goods} for {name}.",
    "{name} in {city} wants to give back a {goods}.",
    "Is the {goods} in stock in {city}?",
    "I paid twice for one {goods}, says {name}.",
    "Can {name} get another {goods} before Friday?",
)
CITIES = words("Oslo Lima Cairo Turin Quito Dakar Osaka Perth Lyon Riga")
NAMES = words("Amara Bruno Chen Dalia Emil Farah Goran Hana Ivo Jaya")
SHARES = {"train": 6, "val": 1, "gate": 1, "test": 2}  # messages of each kind of goods
SEARCH_CALLS = 160


def measure(setting: Setting) -> Measured:
    data = messages(setting.seed)
    common: dict[str, Any] = {
        "rubric": "classify",
        "data": data,
        "model": setting.model,
        "seed": setting.seed,
        "parameters": {"temperature": 0.1},
        "store": setting.scratch / "queues.db",
        "threads": 1,
        "progress": Lines(),
    }
    report = assay.compile(
        "classify",
        prompt_format="lean",
        max_search_calls=SEARCH_CALLS,
        gate=False,  # the winner on val is reported, whatever it is
        test=False,
        out=setting.scratch / "compiled",
        **common,
    )
    values = {
        "right": {"after": assay.evaluate(report.artifact, split="test", **common).evaluation.scores},
        "right by hand": {"after": assay.evaluate(by_hand(), split="test", **common).evaluation.scores},
    }
    lines = {"program": 0, "rubric": 0, "command": 1, "prompt": code_lines(PROMPT)}
    return Measured(values=values, facts={"lines": lines, "winner": report.outcome.winner})


def messages(seed: int) -> list[dict[str, Any]]:
    """Distinct messages with their queue; each kind of goods is equally frequent in each split."""
    rng, rows = random.Random(seed), dict[str, dict[str, Any]]()
    for split, share in SHARES.items():
        for goods in [*QUEUE_OF] * share:
            while True:
                text = rng.choice(WORDINGS).format(goods=goods, city=rng.choice(CITIES), name=rng.choice(NAMES))
                if text not in rows:
                    break
            rows[text] = {"text": text, "label": QUEUE_OF[goods], "split": split}
    return list(rows.values())


def by_hand() -> Classify:
    """The same program with the worked examples of the prompt."""
    agent = Classify(sorted(QUEUE_OF.values()), prompt_format="lean")
    for text in PROMPT.read_text().strip().split("\n\n"):
        agent.predict.demos.append(dict(line.split(": ", 1) for line in text.splitlines()))
    return agent
