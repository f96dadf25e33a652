"""Fields that several settings classes share, each with the help text of its class."""

from typing import Any, Unpack

from assay.models.prices import price_text
from assay.models.thinking import short_form
from assay.support.settings import DeclaredFields, named_setting, setting

RESUMED = False  # for `Declared.job`: a run with another value resumes the same job


def api_base(whose: str, note: str = "") -> Any:
    """The field with the base URL of a role's model server."""
    return setting(None, f"Base URL of an OpenAI-compatible server for {whose}.{note}", metavar="URL")


def api_key_env(whose: str = "this server") -> Any:
    """The field with the name of the environment variable that holds a role's API key."""
    # The key itself is never a setting, so the store never holds one. The variable may be renamed before a resume.
    return setting(
        None,
        f"Environment variable with the API key for {whose}; by default the provider's usual one.",
        metavar="NAME",
        job=RESUMED,
    )


def price_of_model(
    whose: str = "the model",
    note: str = " Also that of the other roles with this model.",
    default: str = "litellm's, to which litellm.register_model adds",
) -> Any:
    """The field with the user's price of a model."""
    return setting(
        None,
        f"Price of {whose} in US dollars for a million tokens of prompt and answer: 0.15,0.60.{note} By default "
        f"{default}.",
        metavar="IN,OUT",
        parse=price_text,
        job=RESUMED,
    )


def thinking_of(whose: str, note: str = "") -> Any:
    """The field with the thinking budget of a role."""
    return setting(
        None,
        f"How much {whose} may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or "
        f"auto (no limit).{note} A model or program that cannot keep it is refused.",
        metavar="BUDGET",
        parse=short_form,
    )


def replace_lms_of(whose: str = "the program", model: str = "the language model") -> Any:
    """The field that replaces the models which a program makes itself."""
    return setting(
        False,
        f"Call {model} in place of the models that {whose} makes itself. By default these are called as they are, also "
        "if a model is named.",
    )


def preflight_of(check: str, without: str) -> Any:
    """The field that switches the check before a run on or off. `without`: what happens if it is off."""
    return setting(True, check, flag="--no-preflight", flag_help=without, job=RESUMED)


def rubric_of() -> Any:
    """The named field of the rubric."""
    return named_setting(
        "Rubric: a YAML file, a shipped name (math_qa, classify, extract, tool_user, code_repair, text_to_sql, "
        "answer_from_documents, converse, nim, experiment), a check (exact), or metrics.py:NAME of a DSPy metric.",
        flag="--rubric",
        metavar="R",
        file=True,
    )


def state_of(whose: str = "the program") -> Any:
    """The field with the file of a state that DSPy saved."""
    return setting(
        None,
        f"State of {whose}, as DSPy's program.save('x.json') writes it: instructions, field texts and demonstrations. "
        "It must have the program's predictors and fields. Not for an artifact, which has its own.",
        metavar="FILE",
        file=True,
        parse=str,
    )


def limit_of(what: str) -> Any:
    """The field with the largest number of things that a command lists or asks about."""
    return setting(20, f"Maximum number of {what}.", ge=1)


def selected(help: str, **declared: Unpack[DeclaredFields]) -> Any:
    """An optional field that selects what one call is about."""
    declared["project"] = False
    return setting(None, help, **declared)
