"""Messages for errors of model clients: which server or key is missing, and what to do."""

from collections.abc import Sequence

from dspy.utils.exceptions import LMError, LMNotConfiguredError

from assay.models.failures import is_refused

_START = {"ollama": " (ollama serve)", "ollama_chat": " (ollama serve)", "hosted_vllm": " (vllm serve NAME)"}


def missing_keys(error: BaseException) -> Sequence[str]:
    """The environment variables for the provider's missing key; empty for any other error."""
    return getattr(error, "env_keys", ()) if isinstance(error, LMNotConfiguredError) else ()


def error_reason(error: BaseException, key: str = "api_key_env", *, base: str = "api_base") -> str:
    """The text of a model client's exception, with what to do about it.

    Args:
        key, base: our arguments for the variable with the model's key and for its address.
    """
    if keys := missing_keys(error):
        model = getattr(error, "model", None) or "the provider"
        return f"{model} needs an API key: set {' or '.join(keys)}, or name the variable that has it ({key})"
    text = str(error).strip().rstrip(".")
    if is_refused(error):
        model = getattr(error, "model", None) or getattr(error.__cause__, "model", None) or ""
        start = _START.get(model.partition("/")[0], "")
        return f"{text}: no server listens there. Start it{start}, or correct its address ({base})"
    if getattr(error, "status", None) == 404:
        return (
            f"{text}: the server has no such model or path. Check the model's name, and that the address ({base}) "
            "ends as the server documents it, mostly with /v1"
        )
    return text if isinstance(error, LMError) else f"{type(error).__name__}: {text}"
