# One command each, from a clone with nothing but Python and make. `make help` lists them.

SHELL := /bin/bash
VENV := .venv
PYTHON_OF_VENV := $(VENV)/bin/python
# The stamp's name is a digest of the requirements: only a changed file reinstalls.
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
CAPTIONS := docs/demo_captions.txt
# Waiting threads must not spin: on two cores two processes of two spinning threads took 34 s for a
# test that takes 5 s.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(PYTHON_OF_VENV) -m pytest
# What `setup` installs; the Dockerfile sets other extras.
PACKAGE := -e '.[dev]'
# Backends whose locks `setup` installs by hash, separated by commas; the Dockerfile sets them.
LOCKED :=
LOCKS := $(patsubst %,-r locks/%.txt,$(shell echo '$(LOCKED)' | tr ',' ' '))
BACKENDS := tensorrt tensorrt-rtx
# Further extras in the image's locks.
IMAGE_EXTRAS := serve export eval c2pa s3

.DEFAULT_GOAL := help
.PHONY: help setup serve load demo test test-slow test-long check format bench screenshots site quality mini-onnx lock clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The first time takes 20 s to 3 min, depending on the network, and 4 GB of disk; 7 GB with PyTorch
# for GPUs.
setup: $(INSTALLED) ## make .venv; takes no time if nothing changed

serve: $(INSTALLED) ## start the service on http://127.0.0.1:8000; Ctrl-C ends it
	$(VENV)/bin/sdxl serve

demo: $(INSTALLED) ## render a contact sheet with the embedded model into out/
	$(VENV)/bin/sdxl render - --seed 7 --out out/demo --sheet out/contact_sheet.png < $(CAPTIONS)
	@echo "see out/contact_sheet.png"

test: $(INSTALLED) ## run every test that takes a few seconds at most
	$(PYTEST) -n 2 -m "not slow and not long" $(PYTEST_FLAGS)

test-slow: $(INSTALLED) ## run the tests that take up to a minute or two
	$(PYTEST) -n 2 -m "slow and not long" $(PYTEST_FLAGS)

test-long: $(INSTALLED) ## run the tests that take minutes to hours
	$(PYTEST) -n 1 -m long --timeout 3600

check: $(INSTALLED) ## check format, lint, types and import rules
	$(PYTHON_OF_VENV) -m ruff format --check .
	$(PYTHON_OF_VENV) -m ruff check .
	$(PYTHON_OF_VENV) -m mypy
	$(PYTHON_OF_VENV) -m pytest -q tests/test_structure.py

format: $(INSTALLED) ## format the code
	$(PYTHON_OF_VENV) -m ruff format .
	$(PYTHON_OF_VENV) -m ruff check --fix .

bench: $(INSTALLED) ## measure speed beside diffusers, torch.compile and DeepCache
	$(VENV)/bin/sdxl bench peers

quality: $(INSTALLED) ## measure the embedded model's quality against speed: renews docs/quality.md and .png
	$(VENV)/bin/sdxl eval --sweep --count 1000 --tuned docs/tuning.json --out out/sweep
	cp out/sweep/quality.{md,png} docs/

load: $(INSTALLED) ## measure the service under load: overhead, throughput, latency, overload
	$(VENV)/bin/sdxl bench load

site: $(INSTALLED) ## build docs/ into HTML, which a service shows at /docs/guide
	$(PYTHON_OF_VENV) -m mkdocs build --strict --quiet

screenshots: $(INSTALLED) ## renew the web page's pictures in docs/; needs Chromium
	WEB_SCREENSHOTS=docs $(PYTHON_OF_VENV) -m pytest $(addprefix tests/serve/service/test_web_,page.py comparison.py animation.py) -k "accessible_in_every_state or in_one_place or animation"

mini-onnx: $(INSTALLED) ## export the embedded model's graphs, after its weights changed
	$(PYTHON_OF_VENV) -m training.mini.graphs

# For the image's Python and C library. uv does not read pip's settings, so the index is passed on; the
# locks do not contain it.
lock: ## renew the hashes of the image's packages in locks/; needs uv
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

clean: ## remove the files that these commands made
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

# Take the first interpreter that is new enough and can make an environment. A version manager's shim
# for an inactive version fails here and is skipped.
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
