"""Names of the default models. Imports nothing: the command line reads them at each start."""

DEFAULT_MODEL = "embedded/smollm2-135m"
DEFAULT_WEIGHTS = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the original weights of it, as transformers loads them
