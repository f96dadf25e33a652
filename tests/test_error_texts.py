"""Texts of errors: what a user reads after a mistake, compared with `error_texts.json`.

`make error-texts` writes the file anew: read its diff as a user would. A case is refused before anything runs, by an
error of assay or a TypeError; a command ends with code 2.
"""

import json
import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.judge import Label
from assay.commands.judge_audit import audit_judge
from assay.commands.scoring import score_rollouts
from assay.commands.traces import close_rollouts, import_rollouts, list_rollouts, rate_rollouts
from assay.errors import AssayError
from assay.models.registry import EMBEDDED
from assay.optimizers import RLTrainer
from rigs.command_line import assay_command

FILE = Path(__file__).with_name("error_texts.json")
JOB = "math_qa --rubric math_qa --data arithmetic:size=80"
OWN = "triage.py --rubric rubric.yaml --data tickets.csv --model openai/m --api-base http://127.0.0.1:9/v1 --dry-run"
COMMANDS = [
    "evaluate p --limit 5",
    "evaluate p --rubrik r",
    "evaluate p --output r.html",
    "evaluate p --trials 5",
    "evaluate p --upstream http://127.0.0.1/v1",
    "traces list -n 5",
    "compile p --output x",
    "compile p --max-examples 5",
    "compile p --max-new-tokens 9",
    "tune p --n-trials 5",
    "judge compile j --data d",
    "serve --base-url http://127.0.0.1/v1",
    "traces score --api-base http://127.0.0.1/v1",
    "train grpo p --lr 1",
    "train grpo p --max-new-tokens 9",
    "train dpo",
    "evaluate items.jsonl --rubric math_qa --data arithmetic:size=9",
    "evaluate math_qa --rubric math_qa --data arithmetics:size=9",
    "runs list --foo",
    "compile",
    "compile triage.py",
    f"compile {OWN.replace('rubric.yaml', 'rubric.yml')}",
    f"compile {OWN.replace('rubric.yaml', 'broken.yaml')}",
    f"compile {OWN.replace('tickets.csv', 'ticket.csv')}",
    f"compile {OWN.replace('triage.py', 'triag.py')}",
    f"compile {OWN.replace('triage.py', 'triage.py:Traige')}",
    f"compile {OWN.replace('http://127', '127')}",
    f"compile {OWN.replace('http://127.0.0.1:9', 'models.example.org')}",
    f"compile {OWN} --optimizer gpea",
    f"compile {OWN} --optimizer gepa --optimizer-set max_metric_cals=3",
    f"compile {OWN} --optimizer gepa --demos 3",
    f"compile {JOB} --difference 2",
    f"compile {JOB} --out file/x",
    f"tune {JOB} --also nosuch",
    f"tune {JOB} --method policy --workers 2",
    f"tune {JOB} --range temperature=hot",
    f"tune {JOB} --range temperature=0:9",
    f"evaluate {JOB} --threads 0",
    f"evaluate {JOB} --threads many",
    f"evaluate {JOB} --fail-under high",
    f"evaluate {JOB} --split vall",
    f"evaluate {JOB} --set max_steps=true",
    f"evaluate {JOB} --set temperature=9",
    f"evaluate {JOB} --model embedded:nosuch.gguf",
    f"evaluate {JOB} --model embedded/smollm",
    f"evaluate {JOB} --report items.jsonl",
    f"evaluate {JOB} --report no/such/folder.html",
    f"improve {JOB} --name x --order dance",
    f"improve {JOB} --name x --model openai/m",
    "migrate triage.py --data tickets.csv --model openai/m",
    "migrate nosuch --data tickets.csv",
    "evaluate triage.py --rubric rubric.yaml --data items.jsonl --model openai/m",
    "evaluate triage.py --rubric mood.yaml --data tickets.csv --model openai/m",
    "evaluate mathqa --rubric math_qa --data arithmetic:size=9",
    "run classify text=x",
    "run math_qa 'what is 1+1'",
    "run math_qa --file items.jsonl --out file/x",
    "run math_qa --file items.jsonl --out ./items.jsonl",
    "run math_qa --file items.jsonl --out rubric.yaml",
    f"train grpo {JOB} --name x --method ppo",
    f"train grpo {JOB} --name ../x",
    "train sft rows --name a/b",
    f"train rl {JOB} --name x --method pppo",
    f"train rl {JOB} --name x --method tune",
    f"train rl {JOB} --name x --method mine.toml",
    f"compile {JOB} --optimizer grpo",
    "judge score 'Is it 2?' --data items.jsonl --out rubric.yaml",
    "judge card nosuch",
    "judge audit 'Is it kind?' --cases a --labels b",
    "judge score 'Is it 2?' --data items.jsonl --out file/x",
    "judge score 'Is it 2?' --data items.jsonl --out items.jsonl",
    "judge drift 'Is it 2?' --freeze items.jsonl --anchors file/x",
    "trust add nosuch",
    "loop install a --out file",
    "traces stats --store items.jsonl",
    "traces list --split bogus",
    "traces list --since yesterday",
    "traces import otlp folder",
    "index . --store folder",
    "models pull nonsense",
    "train sft folder --name a",
    "train sft rows --name x --program math_qa",
    "train grpo --name mine --rubric math_qa --data arithmetic:size=80",
    f"train rloo {JOB} --name x --retention extract",
    "export transitions --out e --balance over --returns uniform --discount 0.5",
]
PROJECT_FILES = [
    "[compil]\ndemos = 3",
    "[compile]\ndemo = 3",
    "[evaluate]\ndemos = 3",
    "[program]\nmodels = 'x'",
    "[train.ppo]\nstep = 3",
    "[compile]\nset = { temperature = 0.1 }",
    "[train.rl]\nmethod = 'ppo'",
    "[defaults]\nmax_call = 3",
    "[defaults]\nx = 3",
    "[serve]\nprot = 0",
    "seed = 3",
    "[compile]\nmax_calls = '5'",
    "[compile]\nthreshold = 2.0",
    "[judge]\nmodel = 5",
    "[judge.audit]\npass_at = true",
    "[export.sft]\nadvantage = 'batch'",
    "[compile]\nsizes = {val = 3}",
    "[evaluate]\nval_size = 3",
    "[compile]\nval_size = 0",
    "[traces.list]\nrun_id = 'x'",
    "[traces.close]\nidle_minutes = nan",
    "[loop.install]\nkind = 'launchd'",
    "[evaluate]\nsplit = 'vall'",
    "[compile]\nmodel = ' '",
    "[compile",
]
CALLS = [
    "assay.load('folder', trut=True)",
    "assay.load(5)",
    "assay.load_rubric('math_qa', judge_m=None)",
    "assay.load_rubric('math_qa', trust='no')",
    "assay.load_rubric('math_qa', judge_model=5)",
    "assay.load_tasks('arithmetic:size=9', limt=3)",
    "assay.load_tasks('arithmetic:size=9', limit='3')",
    "assay.load_tasks('arithmetic:size=9', inputs='question')",
    "assay.load_tasks('arithmetic:size=9', rename='a=b')",
    "assay.load_tasks(5)",
    "assay.load_judge('Is it good?', own_modl=True)",
    "assay.load_judge('Is it good?', scal=('no', 'yes'))",
    "assay.load_judge('Is it good?', own_model=1)",
    "assay.load_judge(5)",
    "assay.load_verifier('Is it good?', trst=True)",
    "assay.project_settings('compil')",
    "assay.project_settings(5)",
    "assay.get_lm('openai/m', temperatue=0.1)",
    "assay.get_lm('openai/m', api_bse='http://127.0.0.1:9/v1')",
    "assay.get_lm('openai/m', temperature='hot')",
    "assay.get_lm('openai/m', max_tokens=0)",
    "assay.get_lm('openai/m', num_retries=None)",
    "assay.get_lm('embedded/smollm2-135m', api_base='http://h')",
    "assay.get_lm(5)",
    "assay.Rubric('r', critera=[])",
    "assay.Rubric('r', 5)",
    "assay.Rubric('r', 'exact')",
    "assay.Store(5)",
    "assay.DataCollector(5)",
    "assay.DataCollector().collect_interaction_data('text')",
    "assay.record('x', rubrc='math_qa').__enter__()",
    "assay.record('x', rubric=5).__enter__()",
    "assay.record('x', store=5).__enter__()",
    "assay.record('x', metadata=5).__enter__()",
    "assay.record(5).__enter__()",
    "assay.run('math_qa', 5)",
    "assay.run('math_qa', 'question')",
    "assay.run(5, {})",
    "assay.evaluate('p', 'r', 'd')",
    "assay.evaluate('math_qa', **JOB, trut=True)",
    "assay.evaluate('math_qa', **JOB, qqqqqq=1)",
    "assay.evaluate('math_qa', **JOB, seed=2**32)",
    "assay.evaluate('math_qa', **JOB, store=5)",
    "assay.evaluate('math_qa', **JOB, progress='yes')",
    "assay.compile('math_qa', **JOB, max_call=3)",
    "assay.compile('math_qa', **JOB, max_calls='5')",
    "assay.compile('math_qa', **JOB, max_calls=5.5)",
    "assay.compile('math_qa', **JOB, max_calls=True)",
    "assay.compile('math_qa', **JOB, max_calls=-1)",
    "assay.compile('math_qa', **JOB, max_cost_usd=math.nan)",
    "assay.compile('math_qa', **JOB, threshold=math.inf)",
    "assay.compile('math_qa', **JOB, difference=0)",
    "assay.compile('math_qa', **JOB, demos=77)",
    "assay.compile('math_qa', **JOB, cache='no')",
    "assay.compile('math_qa', **JOB, resume='no')",
    "assay.compile('math_qa', **JOB, trust='no')",
    "assay.compile('math_qa', **JOB, model=3)",
    "assay.compile('math_qa', **JOB, rename={'a': 1})",
    "assay.compile('math_qa', **JOB, sizes={'val': 0})",
    "assay.compile('math_qa', **JOB, sizes={'vall': 3})",
    "assay.compile('math_qa', **JOB, prompt_format='JSN')",
    "assay.compile('math_qa', **JOB, executor='dask')",
    "assay.compile('math_qa', **JOB, parameters=[('a', 1)])",
    "assay.compile('math_qa', **JOB, thinking='hgih')",
    "assay.compile('math_qa', **JOB, thinking=-1)",
    "assay.compile('math_qa', **JOB, judge_thinking=True)",
    "assay.tune('math_qa', **JOB, trial=1)",
    "assay.tune('math_qa', **JOB, ranges={'max_steps': [1, 'x']})",
    "assay.tune('math_qa', **JOB, also='folder')",
    "assay.tune('math_qa', **JOB, workers=2, method='policy')",
    "assay.tune('math_qa', **JOB, budget={'step': 3.0})",
    "assay.tune('math_qa', **JOB, pruner='none', prune_at=0.3)",
    "assay.compare('math_qa', 'classify', **JOB, max_call=1)",
    "assay.collect('math_qa', **JOB, n=1, max_call=1)",
    "assay.improve('math_qa', **JOB, name='x', max_call=1)",
    "assay.train('math_qa', **JOB, name='x', num_generation=1)",
    "assay.train(5, **JOB, name='x')",
    "assay.train_sft('folder', name='n', evaluation=5)",
    "assay.compile_judge('Is it good?', labels='l', objektive='kappa')",
    "assay.compile_judge('Is it good?', labels=5)",
    "assay.compile_judge('Is it good?', labels=[])",
    "assay.compile_judge(5, labels=[])",
    "audit_judge('Is it good?', pass_al=1)",
    "assay.export('sft', 'new', min_qualtiy=1)",
    "assay.export('sft', 'new', gates={'privacy': 'off'})",
    "assay.export('sft', 'new', advantage='batch')",
    "assay.export('grpo', 'new', min_quality=0.5)",
    "assay.export('sft', 'new', privacy='off', privacy_key='k')",
    "assay.export('sft', 'new', by=['outcome'])",
    "assay.export('sft', 'new', balance='down', most_copies=2)",
    "Label('Is it right?', scale='no,yes').waiting(None)",
    "Label('Is it right?', seed=-1).waiting(None)",
    "close_rollouts(idle_minutes=-1)",
    "import_rollouts('otlp', 'f', score='')",
    "list_rollouts(failure='toool')",
    "list_rollouts(limit=-1)",
    "list_rollouts(min_score=0.8, max_score=0.2)",
    "rate_rollouts('id', math.inf)",
    "rate_rollouts(limit='5')",
    "score_rollouts(rubric='math_qa', judge_api_base='http://x')",
    "score_rollouts(rubric='math_qa', judge_model=' ')",
    "score_rollouts(rubric='math_qa', runs='r1')",
    "score_rollouts(rubric='math_qa', task_timeout=math.nan)",
    "score_rollouts(rubric='math_qa', threads=0)",
    "RLTrainer(None, None, [1, 2], sed=1)",
]
NAMES = {
    "assay": assay,
    "math": math,
    "JOB": {"rubric": "math_qa", "data": "arithmetic:size=80"},
    "RLTrainer": RLTrainer,
    "audit_judge": audit_judge,
    "close_rollouts": close_rollouts,
    "import_rollouts": import_rollouts,
    "list_rollouts": list_rollouts,
    "rate_rollouts": rate_rollouts,
    "score_rollouts": score_rollouts,
    "Label": Label,
}
PROGRAM = """
import dspy


class Triage(dspy.Module):
    def __init__(self):
        super().__init__()
        self.read = dspy.Predict("ticket -> queue")

    def forward(self, ticket):
        return self.read(ticket=ticket)
"""
FILES = {
    "triage.py": PROGRAM,
    "rubric.yaml": "name: r\ncriteria:\n- {name: right, check: exact}\n",
    "broken.yaml": "name: r\ncriteria:\n  - name: right\n     weight: 1\n",
    "mood.yaml": "text: Is it kind?\nscale: [no, yes]\n",
    "tickets.csv": "ticket,queue\n" + "".join(f"refund {number},billing\n" for number in range(80)),
    "items.jsonl": '{"task_input": "2", "output": "2"}\n',
    "file": "",
    "folder/manifest.json": "{}",
}


@pytest.fixture(autouse=True)
def shipped_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded models without the one that tests of this process may have added."""
    monkeypatch.delitem(EMBEDDED, "small", raising=False)


@pytest.fixture(scope="module")
def texts() -> Iterator[dict[str, str]]:
    """The stored texts by case. With ASSAY_WRITE_TEXTS those of this run are stored instead."""
    if not os.environ.get("ASSAY_WRITE_TEXTS"):
        yield json.loads(FILE.read_text(encoding="utf-8"))
        return
    written: dict[str, str] = {}
    yield written
    FILE.write_text(json.dumps(written, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def compare(texts: dict[str, str], case: str, text: str, folder: Path) -> None:
    text = " ".join(text.replace(str(folder), "FOLDER").split())
    if os.environ.get("ASSAY_WRITE_TEXTS"):
        texts[case] = text
    assert text == texts.get(case), f"{case}\nIf the text has to change: make error-texts"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_was_wrong(
    command: str, texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if command.startswith(("export", "traces list")):
        assay.Store(tmp_path / ".assay" / "assay.db").close()
    done = assay_command(*shlex.split(command))
    assert (done.code, done.stdout) == (2, "")
    assert (tmp_path / "items.jsonl").read_text() == FILES["items.jsonl"]
    compare(texts, f"assay {command}", done.stderr.rpartition("\nError: ")[2], tmp_path)


@pytest.mark.parametrize("text", PROJECT_FILES)
def test_a_project_file_is_refused_by_its_table_and_key(text: str, texts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "assay.toml").write_text(text)
    with pytest.raises(AssayError) as refused:
        assay.project_settings("compile")
    compare(texts, text, str(refused.value), tmp_path)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_refused_by_its_argument(call: str, texts: dict[str, str], tmp_path: Path) -> None:
    values: dict[str, Any] = dict(NAMES)
    with pytest.raises((AssayError, TypeError)) as refused:
        eval(call, values)
    compare(texts, call, str(refused.value), tmp_path)
