# One command each, from a clone with nothing but Python and make. `make help` lists them.

SHELL := /bin/bash
VENV := .venv
PYTHON_OF_VENV := $(VENV)/bin/python
# The stamp is named after what was installed: touching a file reinstalls nothing, changing it does.
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
CAPTIONS := docs/demo_captions.txt
# Threads that wait without spinning: two processes of two threads on two cores took 34 s for a test
# that takes 5 s so.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(PYTHON_OF_VENV) -m pytest
# What `setup` installs; the Dockerfile asks for a copy with other extras instead.
PACKAGE := -e '.[dev]'
# Backends whose locks `setup` installs from, by hash, with commas between; the Dockerfile names them.
LOCKED :=
LOCKS := $(patsubst %,-r locks/%.txt,$(shell echo '$(LOCKED)' | tr ',' ' '))
BACKENDS := tensorrt tensorrt-rtx
# What the image can besides: the extras that its locks have.
IMAGE_EXTRAS := serve export eval c2pa s3

.DEFAULT_GOAL := help
.PHONY: help setup serve load demo test test-slow test-long check format bench editing-sheet screenshots quality mini-onnx lock full-size full-size-drill clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The first time: 20 s to 3 min, as fast as packages come, and 4 GB of disk, 7 GB where PyTorch's build
# for GPUs is chosen.
setup: $(INSTALLED) ## make .venv; seconds when nothing changed

serve: $(INSTALLED) ## the whole service on http://127.0.0.1:8000; Ctrl-C ends it
	$(VENV)/bin/sdxl serve

demo: $(INSTALLED) ## render a contact sheet with the embedded model into out/
	$(VENV)/bin/sdxl render - --seed 7 --out out/demo --sheet out/contact_sheet.png < $(CAPTIONS)
	@echo "see out/contact_sheet.png"

test: $(INSTALLED) ## every test that takes a few seconds at most
	$(PYTEST) -n 2 -m "not slow and not long" $(PYTEST_FLAGS)

test-slow: $(INSTALLED) ## the tests that take up to a minute or two
	$(PYTEST) -n 2 -m "slow and not long" $(PYTEST_FLAGS)

test-long: $(INSTALLED) ## the tests that take minutes to hours
	$(PYTEST) -n 1 -m long --timeout 3600

check: $(INSTALLED) ## format, lint, types, import rules
	$(PYTHON_OF_VENV) -m ruff format --check .
	$(PYTHON_OF_VENV) -m ruff check .
	$(PYTHON_OF_VENV) -m mypy
	$(PYTHON_OF_VENV) -m pytest -q tests/test_structure.py

format: $(INSTALLED) ## rewrite the files as `check` wants them
	$(PYTHON_OF_VENV) -m ruff format .
	$(PYTHON_OF_VENV) -m ruff check --fix .

bench: $(INSTALLED) ## speed beside diffusers, torch.compile and DeepCache, in one run
	$(PYTHON_OF_VENV) -m eval.speed.peers

quality: $(INSTALLED) ## quality against speed of the embedded model: renews docs/quality.*
	$(VENV)/bin/sdxl eval --sweep --count 1000 --tuned docs/tuning.json --out out/sweep
	cp out/sweep/quality.{md,png,svg} docs/

load: $(INSTALLED) ## the service under load: overhead, throughput, latency, overload
	$(PYTHON_OF_VENV) -m eval.service.load

editing-sheet: $(INSTALLED) ## the picture of docs/editing.md again
	$(PYTHON_OF_VENV) -m serve.render.editing_sheet docs/editing.png

screenshots: $(INSTALLED) ## the web page's pictures in docs/ again, from its tests; needs Chromium
	WEB_SCREENSHOTS=docs $(PYTHON_OF_VENV) -m pytest $(addprefix tests/serve/service/test_web_,page.py comparison.py animation.py) -k "how_it_looks or in_one_place or animation"

mini-onnx: $(INSTALLED) ## export the embedded model's graphs again, after its weights changed
	$(PYTHON_OF_VENV) -m onnx_export.shipped

# The image's Python and C library. uv does not read pip's settings, so the index is handed over; it
# is not written into the locks.
lock: ## hashes of all that the image installs, into locks/; needs uv
	index=$$(python3 -m pip config get global.index-url 2> /dev/null); \
	lock() { \
	  name=$$1; shift; \
	  uv pip compile "$$@" \
	    -c constraints.txt --generate-hashes --no-emit-index-url --no-annotate \
	    --python-version 3.12 --python-platform x86_64-manylinux_2_39 --no-python-downloads \
	    --custom-compile-command "make lock" $${index:+--default-index "$$index"} \
	    --quiet --upgrade --output-file locks/$$name.txt; \
	}; \
	for backend in $(BACKENDS); do \
	  lock $$backend pyproject.toml $(IMAGE_EXTRAS:%=--extra %) --extra $$backend || exit 1; \
	done; \
	echo 'ray[serve]' | lock llm -

full-size-drill: $(INSTALLED) ## random-weight SDXL 1.0 through render, serve, batch, export; hours, 24 GiB
	$(PYTHON_OF_VENV) -m eval.robustness.drill

full-size: $(INSTALLED) ## what SDXL's real size costs here: random weights, export, plans for an L40S
	$(PYTHON_OF_VENV) -m onnx_export.full_size

clean: ## remove what these commands made
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(INSTALLED):
	@$(call make_venv)
ifneq ($(LOCKED),)
	$(PYTHON_OF_VENV) -m pip install --quiet --require-hashes $(LOCKS)
	$(PYTHON_OF_VENV) -m pip install --quiet --no-deps --no-build-isolation $(PACKAGE)
else
	$(PYTHON_OF_VENV) .ci/install.py -c constraints.txt $(PACKAGE)
endif
	@rm -f $(VENV)/.installed-* && touch $@

# The first interpreter that is new enough and can make an environment; a version manager's shim
# for a version that is not active fails here and is passed over.
define make_venv
test -x $(VENV)/bin/pip && exit 0; \
for python in $(PYTHON) python3.12 python3.11 python3 python; do \
  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    echo "making $(VENV) with $$($$python --version)"; \
    exec $$python -m venv --clear $(VENV); \
  fi; \
done; \
echo "Python 3.11 or newer with venv is needed; found: $$(python3 --version 2>&1 || echo none)." \
  "Install it, or name one: make setup PYTHON=/path/to/python3.11" >&2; \
exit 1
endef
