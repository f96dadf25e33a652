# Everything works from a bare checkout with Python 3.11+, make and the package registries.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export LITELLM_LOCAL_MODEL_COST_MAP := True
unexport PYTHONDONTWRITEBYTECODE  # every test process and command would compile all modules again
# One worker more than there are cores, at most four: a quarter of the tests' time is spent waiting for servers, limits
# and locks. The quick tests wait more, and load no model, so memory allows two a core.
WORKERS := $(shell $(PYTHON) -c "import os; print(min(4, 1 + (os.cpu_count() or 1)))")
quick: WORKERS := $(shell $(PYTHON) -c "import os; print(min(8, 2 * (os.cpu_count() or 1)))")
QUICK := "not model and not slow and not postgres and not chaos and not tutorial"
# A worker that dies ends the run: after a restart pytest-xdist may never send the last tests.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/clients --numprocesses $(WORKERS) --dist loadfile \
	--no-loadscope-reorder --max-worker-restart 0

STUB_TESTS := tests/models/test_engine_contract.py tests/models/test_dspy_versions.py tests/traces/test_own_lms.py
# their scripted answers are in the chat format
STUB_CHAT_TESTS := $(addprefix tests/, models/test_ledger.py commands/test_migrate.py traces/test_recorder.py \
	traces/test_gateway_conversations.py rubrics/test_protection.py judges/test_reading.py $(addprefix programs/test_, \
	agents.py converse.py dspy_modules.py threads_in_programs.py tool_user.py typed_programs.py) \
	$(addprefix optimizers/test_, adapters.py any_teleprompter.py own_prompt_formats.py repairs.py))

.PHONY: contract demo docs error-texts figures fmt quick tutorials test test-min test-new test-stub test-clients check lint chaos clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing assay with the embedded model's engine (about a minute) …"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[embedded]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing assay with everything its tests need (about two minutes) …"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[tasks]' \
		|| echo "reasoning-gym could not be installed (one of its packages needs a C compiler); its test is skipped"
	@touch $@ $(VENV)/.demo

# The main job on real input: a 135M model learns to work with its calculator because its prompt was compiled against a
# rubric.
demo: $(VENV)/.demo
	$(BIN)/assay models pull smollm2-135m
	cd $$(mktemp -d) && $(abspath $(BIN))/assay compile math_qa --rubric math_qa \
		--data "arithmetic:terms=2-3&digits=2-3&size=600" --model embedded/smollm2-135m \
		--set temperature=0.1 --max-search-calls 140 --gate-size 10 --test-size 10

test: $(VENV)/.dev
	$(BIN)/assay models pull smollm2-135m
	$(PYTEST) --durations=20

# The tests of `make test` with the lowest and with the highest versions that the ranges in pyproject.toml allow, each
# in a virtual environment of its own. constraints.txt applies to torch alone: wheels of its other versions bring
# gigabytes of CUDA libraries. So the range of torch is not tested here.
test-min: RESOLUTION := lowest-direct
test-new: RESOLUTION := highest
test-min test-new: test-%:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --upgrade pip uv
	.venv-$*/bin/python -m pip install --quiet --constraint constraints.txt torch
	echo torch > .venv-$*/excludes.txt
	VIRTUAL_ENV=$(abspath .venv-$*) .venv-$*/bin/uv pip install --quiet --resolution $(RESOLUTION) --upgrade \
		--index-strategy unsafe-best-match --excludes .venv-$*/excludes.txt --editable '.[dev]'
	.venv-$*/bin/assay models pull smollm2-135m
	$(subst $(BIN)/python,.venv-$*/bin/python,$(PYTEST))

# What calls models, in the shapes that are announced for DSPy 3.5: tests/stub_dspy35.py. First with its default format,
# then programs, formats, agents, recording and teleprompters with the chat format configured.
test-stub: $(VENV)/.dev
	$(PYTEST) -p tests.stub_dspy35 -m $(QUICK) $(STUB_TESTS)
	STUB_FORMAT=chat $(PYTEST) -p tests.stub_dspy35 -m $(QUICK) $(STUB_CHAT_TESTS)

# Agents on real client libraries, against a scripted model alone and through the gateway, with a table at the end: it
# installs the libraries. And DSPy programs of many shapes through the commands, with requests counted at the server.
test-clients: $(VENV)/.dev
	$(BIN)/assay models pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients --durations=15 --numprocesses 2 --dist worksteal

# The documentation as a site in site/: pages of docs/ and a reference that is generated from the code. A broken link is
# an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Pages and examples that compile and train with the embedded model, and trainings of several processes (about half an
# hour on two cores).
tutorials: $(VENV)/.dev
	$(BIN)/assay models pull smollm2-135m
	$(PYTEST) -m tutorial --durations=20

# Stores what the tests of the contract suite find, in one process: each JSON file holds the results of several tests.
contract: $(VENV)/.dev
	$(BIN)/python -m pytest tests/contract --write-contract

# Stores the texts of errors that tests/test_error_texts.py compares. Read the diff as a user would.
error-texts: $(VENV)/.dev
	ASSAY_WRITE_TEXTS=1 $(BIN)/python -m pytest tests/test_error_texts.py

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Unit and scripted tests: nothing that runs a language model, a database server or clients of other libraries. The
# model's file must be there, because commands name it.
quick: $(VENV)/.dev
	@$(BIN)/assay models pull smollm2-135m
	$(PYTEST) -m $(QUICK)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The claims in one table, benchmarks/results/seeds.md: measures what is missing, for three seeds, a few minutes each on
# two cores. STRONGER=FILE.gguf: also the rows that need a stronger model. `make figures ROWS=judge` measures some rows.
figures: $(VENV)/.dev
	$(BIN)/assay models pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/figures.py run $(ROWS) $(if $(STRONGER),--stronger $(STRONGER))

# Tests that kill processes, fill disks and wait for what hangs. Then twenty kills of each kind of job and three of each
# training, compared with unkilled runs (about a quarter of an hour on two cores). Then 10,000 calls through the gateway
# on each database, while processes are killed and the store is locked, full or away (another half an hour), and two
# gateways on one store.
chaos: $(VENV)/.dev
	$(BIN)/assay models pull smollm2-135m
	$(PYTEST) -m chaos --durations=20
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos.py --kills 20
	$(BIN)/python benchmarks/chaos_gateway.py --store sqlite
	$(BIN)/python benchmarks/chaos_gateway.py --store postgresql
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos_machines.py
	$(BIN)/python benchmarks/chaos_gateways.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos_deployments.py --kills 100
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos_deployments.py --kills 30 --store postgresql --database
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos_ray.py

check: lint docs test test-stub test-clients

clean:
	rm -rf $(VENV) .venv-min .venv-new build dist *.egg-info
