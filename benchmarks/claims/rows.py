"""The rows of the table."""

from claims.conversation_rows import CONVERSATION_ROWS
from claims.document_rows import DOCUMENT_ROWS
from claims.table import (
    Row,
    as_good_as,
    cheaper,
    effort,
    gain,
    not_below,
    over_seeds,
    relative,
    revised,
    share,
    statements,
)

ROWS = (
    Row(
        name="adoption",
        claim="tool adoption of a calculator agent, compiled",
        goal="10 to 40 %",
        measurement="sums",
        cells=gain("adoption", least=0.3, most_before=0.1, least_after=0.4),
        note="`calculator_agent.py` in the prompt format `lean`. A run adopts the tool if a call of it succeeded. In "
        "the format `json` the plain agent calls the calculator on every task, with useless expressions.",
    ),
    Row(
        name="completion",
        claim="task completion: right answers of the same agent",
        goal="+25 points",
        measurement="sums",
        cells=gain("correct", least=0.25),
        note="25 points are more than 25 % of any score, so this is the stricter reading of +25 %.",
    ),
    Row(
        name="held_out",
        claim="held out: right answers on longer sums than any that the compile run saw",
        goal="+10 points",
        measurement="sums",
        cells=gain("longer", least=0.1),
        note="5 to 6 terms of 3 to 4 digits; the compile run had 2 to 3 terms of 2 to 3 digits.",
    ),
    Row(
        name="effort",
        claim="lines a person writes: hand-written prompt, compiled program of equal score",
        goal="-80 %",
        measurement="hand_written",
        also="sums",
        cells=effort("correct by hand", "correct"),
        note="counted are lines that are not empty, without module docstrings: of `calculator_prompt.txt` on one side, "
        "of `calculator_agent.py`, `calculator_agent.yaml` and one command on the other. Both agents are the same "
        "program; its lines are counted only on the compiled side. Twelve lines of program, rubric and command are "
        "needed for an own program whatever the prompt; `effort_math` has a shipped one.",
    ),
    Row(
        name="effort_math",
        claim="the same with the shipped `math_qa` and its shipped rubric",
        goal="-80 %",
        measurement="sums_shipped",
        cells=effort("right by hand", "right"),
        note="the tasks, the hand-written prompt and the counting rule of `effort`, and `math_qa` on both sides: a "
        "person writes one command.",
    ),
    Row(
        name="effort_shipped",
        claim="the same for a classifier of 24 classes, with the shipped `classify`",
        goal="-80 %",
        measurement="queues",
        cells=effort("right by hand", "right"),
        note="messages to a shop, each kind of goods with its queue by a house rule. Counted as in `effort`; program "
        "and rubric are shipped, so that a person writes one command. In a trial on 24 val tasks a prompt of 48 lines "
        "had 12 % right. A guess has 4 %: such a prompt hardly helps this model, and none of equal score was found. "
        "So the compiled side is shorter and better, but its saving at equal score is unknown.",
    ),
    Row(
        name="judge",
        claim="judge accuracy on tweets, calibrated on labels",
        goal="+15 points",
        measurement="judge",
        cells=gain("accuracy", least=0.15),
        note="compared with the label that most raters chose. 13 of 209 items are unscored on both "
        "sides; counted as wrong they make it +14.6 points [7.2, 22.0].",
    ),
    Row(
        name="refinement",
        claim="refinement: tokens and score of `Refine`, compared with votes of the same program",
        goal="-5 % tokens at equal score or +5 % score at equal tokens",
        measurement="refinement",
        cells=revised,
        note="a predictor writes an expression and its value; the verifier computes that expression and says its "
        "value, but sees no expected answer. The other side is a vote of up to three answers, at about as many tokens. "
        "Three verifiers of dates (format and words; the same with the words of the text named; a draft without its "
        "field name) gave no clear gain in trials of 14 tasks (21 to 29 % right, 29 % for one answer): this model "
        "copies the draft.",
    ),
    Row(
        name="adoption_when_needed",
        claim="`tool_user`, held-out tools: adoption when a tool is needed",
        goal="from at most 10 % to at least 40 %",
        measurement="tool_use",
        enough=1,
        cells=gain("adoption", least=0.3, most_before=0.1, least_after=0.4),
        note="six labelled decisions as demonstrations, half of them without a call, on both sides. Before, the agent "
        "calls from an estimated need of 0.5 on; after, from a threshold fitted on val to abstain on 95 % of the "
        "tasks that need no tool. As it comes, `tool_user` calls a tool on nearly every task, so it is not a start of "
        "at most 10 %. This model hardly tells the two kinds of tasks apart. Tried on 12 to 20 val tasks that need a "
        "tool and 10 to 12 that need none, of two other seeds, with the area under the ROC curve: no demonstrations "
        "(0.73 and 0.60), six (0.80 and 0.44), twelve (0.78), twelve whose thought says what is asked and whether a "
        "tool fits (0.46), six whose thought names the tool that is asked for (0.70), eight and twenty whose thought "
        "has the words of the question (0.74, 0.69), eight that write what is offered next to what is asked (0.65). "
        "At 90 % abstention they adopt on 7 to 70 % of the tasks. Fine-tuned on the curriculum: `adoption_trained`.",
    ),
    Row(
        name="abstention",
        claim="the same: abstention when no tool is needed",
        goal="at least 90 %",
        measurement="tool_use",
        enough=1,
        cells=share("abstention", least=0.9),
        note="reached by an agent that hardly calls any tool, so it says little without the row above.",
    ),
    Row(
        name="adoption_trained",
        seeds=(3, 4, 5),
        claim="the same model fine-tuned on the curriculum `tool_use`: adoption on held-out tools",
        goal="from at most 10 % to at least 40 %",
        measurement="tool_training",
        enough=1,
        cells=gain("adoption", least=0.3, most_before=0.1, least_after=0.4),
        note="`tool_user` without demonstrations, its first decision only. Supervised fine-tuning (LoRA, one epoch) "
        "on 128 runs of a scripted agent that makes the expected decisions of train tasks of the stage `irrelevant`, "
        "half of which need no tool. Both sides have a threshold of their own, fitted to abstain on 98 % of the some "
        "60 val tasks that need none: as it comes, the untrained agent calls a tool on 90 to 100 % of all tasks. The "
        "protocol before (seeds 0 to 2) asked for 95 % of some 18 val tasks: adoption 13 to 100 %, abstention 88.7 %.",
    ),
    Row(
        name="abstention_trained",
        seeds=(3, 4, 5),
        claim="the same: abstention when no tool is needed",
        goal="at least 90 %",
        measurement="tool_training",
        enough=1,
        cells=share("abstention", least=0.9),
    ),
    Row(
        name="thinking",
        seeds=(3, 4, 5),
        claim="thinking tokens of a task on mixed chain sums, policy fitted on other tasks",
        goal="-40 %, score inside a margin of 1 point",
        measurement="thinking",
        cells=cheaper("thinking", "score", least=0.4, margin=0.01, loops="loops"),
        enough=1,
        note="seeds 3, 4 and 5. Two of three tasks are a bare number, for which the agent needs no tool and no "
        "thought; the others are chains of two or three terms, on which it calls the calculator mostly only after a "
        "thought. The policy is the one that saves most among those that 300 val tasks show to lose at most 1 point. "
        "The thresholds that are tried, 0.95 to 0.993, were set after a pilot with another seed (90, n = 120): from "
        "0.98 on no task was lost, with 46 to 59 % of the thinking tokens saved. The protocol before (seeds 0 and 1) "
        "chose by the mean loss on 80 val tasks, which is too coarse a rule for a margin of 1 point: tokens -55 % "
        "[-60, -49], score -1.5 points [-3.0, -0.3], n = 400. A policy saves hardly any of all tokens: a probe repeats "
        "a long prompt to save a thought of ten tokens. Also tried: `classify` with the results as labels on chains of "
        "2 to 3 terms without a tool (57 % and 7 % right without a thought, 29 % and 14 % with one, n = 14): this "
        "model cannot add in its thoughts.",
    ),
    Row(
        name="thinking_stronger",
        seeds=(3, 4, 5),
        claim="thinking tokens on a task where thinking helps (stronger model)",
        goal="-40 %, score inside a margin of 1 point",
        measurement="thinking_stronger",
        cells=cheaper("thinking", "score", least=0.4, margin=0.01, loops="loops"),
        enough=1,
        note="seeds 3, 4 and 5. Sums of two terms of one digit, and as many of three or four, by a Qwen2.5-Coder "
        "model of 0.5 billion parameters and the shipped `classify`. Without any thought it has 82 % of 40 val tasks "
        "and 83 % of 60 test tasks right, so that thinking helps. The policy is the one that saves most among those "
        "that lose none of 94 val tasks. The protocol before (seeds 0 to 2) fitted on 40 val tasks, which is too "
        "coarse: tokens -50 % [-59, -42], score -0.6 points [-3.3, 0.5], n = 180.",
    ),
    Row(
        name="unnecessary_changes",
        claim="unnecessary changed statements, trained with and without the criteria",
        goal="-70 %",
        measurement="minimal_edits",
        cells=relative("excess", least=-0.7, form=statements),
        note="per edit, beyond those of the smallest fix. An agent edits a file whose checker is in the same file: "
        "GRPO on that checker alone, and on it with `minimal_diff` and `no_hacks`, from the same warmed-up model (15 % "
        "of its rows edit the checker), with the same tasks, rollouts and steps. Nearly all of "
        "them are the edited checker: the warmed-up model seldom writes the longer forms of a fix.",
    ),
    Row(
        name="hack_rate",
        claim="hack rate, trained with and without the criteria",
        goal="-70 %",
        measurement="minimal_edits",
        cells=relative("hacked", least=-0.7, score="correct"),
        note="of the same trainings: edits whose own checker passes and whose true checker fails; right are those that "
        "pass the true one.",
    ),
    Row(
        name="rubric_training",
        claim="score of a policy trained on the weighted rubric with step rewards, compared with the bare outcome",
        goal="+25 % relative, equal rollouts",
        measurement="rubric_training",
        cells=relative("correct", least=0.25),
        note="right answers of `math_qa` on its shipped rubric with step rewards, and on right answers alone, from the"
        " same warmed-up model, whose rows call the calculator in 40 % of the runs, with a right expression in "
        "half of these. Trials with other seeds, one each: with calls in half of the rows both sides learned the "
        "task, 78 and 91 % right (+16 %, n = 32); with calls in 40 % and right expressions in 40 % of these the "
        "bare outcome saw no right answer in 72 rollouts, and the rubric taught the calls (5 to 12 of 12) but not"
        " the expressions; with calls in 15 and 30 % the bare outcome saw no right answer in the two to three "
        "steps that were run.",
    ),
    Row(
        name="forgetting",
        claim="another task after training: nothing forgotten",
        goal="no significant loss",
        measurement="forgetting",
        cells=not_below("other"),
        note="the city that a sentence names, from four demonstrations, by the embedded model as it comes and after "
        "the training of `hack_rate` with the criteria. A task near to that training is not safe: in a first run of "
        "seed 0, chain sums written as expressions fell from 100 to 72 % (n = 40), because terms were added to them as "
        "in the formulas of the training.",
    ),
    Row(
        name="game",
        claim="Nim against an opponent: games won, trained on its own wins",
        goal="interval above zero",
        measurement="game",
        cells=gain("won", least=0.0),
        note="5 to 11 sticks, and an opponent that makes the best move half of the time. Every game can be won. The "
        "plain agent plays 240 games of train tasks at temperature 1; the moves of those that it won are trained on.",
    ),
    Row(
        name="experiment",
        claim="experiment with noisy outcomes: yield of the last plan, trained on the best fixed plans of random "
        "experiments",
        goal="interval above zero",
        measurement="yields",
        cells=gain("yield", least=0.0),
        note="yield without noise, as a share of the best plan's. Three trials, of which the last one counts. In 2,240 "
        "experiments of train tasks plans are drawn at random; of each material the plan with the highest mean score "
        "is chosen, and up to 15 calls that wrote it are trained on (12 epochs). The plain agent writes the plan of "
        "its instructions, whatever the material. The rows of a material have one plan, so that nothing teaches to "
        "adapt it to the trials of a sample. The best fixed plan of each material has 80 %. Tried "
        "before, in pilots with seed 90 (35 % before): own experiments with a score of at least 0.75 (three seeds: "
        "-0.6 points [-6.6, 5.4]; they have no good plan for iron); the 8 best own plans of each material (24 %); the "
        "calls of the two best of 400 random experiments (9 %; all first trials were of iron), also with varied first "
        "trials (25 %); all last plans of 2,400 random experiments with at least 75 % (28 %); the two best plans by "
        "mean score with 6 epochs (21 %). Until some 40 optimizer steps the model writes one plan for all materials.",
    ),
    Row(
        name="unseen_schema",
        claim="text to SQL on a schema that was not compiled on: right rows",
        goal="interval above zero",
        measurement="sql",
        cells=gain("rows_match", least=0.0),
        note="compiled on questions about a library, reported on questions about a clinic. A Qwen2.5-Coder model of "
        "0.5 billion parameters answers all 40 questions of seed 0 rightly, without and with a compilation.",
    ),
    Row(
        name="unseen_schema_trained",
        claim="the same questions, fine-tuned on queries of five other schemas: right rows",
        goal="interval above zero",
        measurement="sql_training",
        cells=gain("rows_match", least=0.0),
    ),
    Row(
        name="query_cost",
        seeds=(3, 4, 5),
        claim="text to SQL: instructions of SQLite's machine, before and after training with `query_cost`",
        goal="-30 %, right rows inside a margin of 5 points",
        measurement="query_cost",
        cells=cheaper("instructions", "right", least=0.3, margin=0.05, unit="instructions"),
        note="of questions that all sides answer rightly. Before: warmed up on right queries, 70 % of them by LIKE. "
        "After: fine-tuned on its own answers to train questions with a score of at least 0.9, which a query as cheap "
        "as the expected one has. Trained on all right answers instead, the control stayed dear with two of three "
        "seeds (69, 511, 502 instructions). The sizes were set after a pilot (seed 90). The protocol before, GRPO "
        "for 8 steps of 12 rollouts (seeds 0 to 2): instructions -48 % [-64, -32], score -14.2 points [-21.7, -7.4], "
        "n = 120; 16 steps of 24 rollouts at a third of the learning rate lost 5 points of a pilot (n = 40).",
    ),
    Row(
        name="any_agent",
        claim="an agent on OpenAI's SDK, trained on-policy without a change: right answers",
        goal="interval above zero",
        measurement="any_agent",
        cells=gain("foreign", least=0.0),
        note="greedy. Sampled at temperature 1, the same tasks rose from 57, 60, "
        "52 to 100, 82, 95 %, those of the agent written in DSPy from 62, 57, 60 to 97, 97, 100 %.",
    ),
    Row(
        name="any_agent_twin",
        claim="the same after training: the agent written in DSPy (before), the foreign one",
        goal="at most 10 % lower",
        measurement="any_agent",
        cells=as_good_as("twin", "foreign", within=0.1, rate="samples_per_s"),
        note="the same instructions, examples, tool, tasks, rollouts and steps. Samples are rollouts of the training, "
        "in the time that they take.",
    ),
    Row(
        name="any_agent_langgraph",
        claim="the same agent as a LangGraph graph, trained on-policy without a change: right answers",
        goal="interval above zero",
        measurement="any_agent_langgraph",
        cells=gain("langgraph", least=0.0),
        note="measured with 3 to 8 cores and a GPU (H200), which computes the gradients; 1.5 to 3.0 samples/s. Sampled "
        "at temperature 1, the same tasks rose from 60, 60, 50 to 98, 100, 95 %.",
    ),
    Row(
        name="any_agent_node",
        claim="the same agent as a Node program, trained on-policy without a change: right answers",
        goal="interval above zero",
        measurement="any_agent_node",
        cells=gain("node", least=0.0),
        note="0.5 to 0.65 samples/s on one core. Sampled at temperature 1: from 58, 60, 55 to 100, 100, 95 %.",
    ),
    *(
        Row(
            name=f"{kind}_{agent}",
            claim=f"the system message of {title}, compiled {how} without a change of its code: right answers",
            goal=goal,
            measurement=f"{kind}_{agent}",
            cells=gain("correct", least=0.0),
            note="the stronger model proposes. The agent's own text counts on both sides where no text passed the gate."
            if (kind, agent) == ("compiled", "openai")
            else "",
        )
        for kind, how, goal in (("compiled", "by auto", "interval above zero"), ("gepa", "by GEPA", "for comparison"))
        for agent, title in (
            ("openai", "the agent on OpenAI's SDK"),
            ("langgraph", "the LangGraph agent"),
            ("node", "the Node agent"),
        )
    ),
    Row(
        name="delayed_credit",
        seeds=(0, 1, 2, 3, 4),
        claim="ten calls whose effects show three calls later: right decisions by episode-level, turn-level credit",
        goal="faster or higher, interval over seeds above zero",
        measurement="delayed_credit",
        cells=over_seeds("right", ("episode", "to_go")),
        note="seeds 0 to 4; intervals over seeds. Area: mean training score.",
    ),
    Row(
        name="bfcl_simple",
        claim="BFCL simple: all calls right, plain `tool_user`",
        goal="reported",
        measurement="bfcl",
        cells=share("simple_python"),
    ),
    Row(
        name="bfcl_multiple",
        claim="BFCL multiple: all calls right",
        goal="reported",
        measurement="bfcl",
        cells=share("multiple"),
    ),
    Row(
        name="bfcl_irrelevance",
        claim="BFCL irrelevance: no call",
        goal="reported",
        measurement="bfcl",
        cells=share("irrelevance"),
    ),
    *CONVERSATION_ROWS,
    *DOCUMENT_ROWS,
    Row(
        name="code_repair",
        claim="code repair: hidden tests pass (stronger model)",
        goal="reported",
        measurement="code_repair",
        cells=share("repaired"),
        enough=1,
        note="eight mutated functions of the standard library a seed, of at most 500 characters, with four steps "
        "each; the agent has no demonstrations. A Qwen2.5-Coder model of 0.5 billion parameters. Measured "
        "before mutants were written without the parentheses that showed the place of a quarter of them.",
    ),
)
