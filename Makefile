# Every target sets itself up: a virtual environment, the pinned packages, then the work.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2
EXTRAS := .[dev,hub,flower-datasets,flower,sign,onnx,serve,track]

.PHONY: demo test lint types imports browser unit soak reliability bench wheel docs pictures examples headline paper clean

demo: $(STAMP)
	$(BIN)/oneflare compare fedavg fafi flare analytic data=digits alpha=0.05 clients=5 --seeds 1 --out runs/demo

test: lint types imports unit

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

# Chromium for the browser tests; where it cannot be had they are skipped and say why.
browser: $(STAMP)
	-$(BIN)/python tests/browser.py

# Workers take tests from each other, so that both end together. What rests on rounding is run a second time with the
# instructions of an older processor; only files that have such tests are read for it.
unit: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not soak"
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) --dist worksteal \
	  -m "numeric and not soak" $$(grep -rl --include='test_*.py' 'mark\.numeric' tests)

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal -m soak
	$(BIN)/python tests/reliability/table.py

# the table of docs/reliability.md from the figures of the last soak
reliability: $(STAMP)
	$(BIN)/python tests/reliability/table.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# In an environment of its own, from the index, without the repository on the path.
wheel: $(STAMP)
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --no-isolation --outdir build/wheel .
	$(BIN)/python -m venv build/wheel/env
	build/wheel/env/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	build/wheel/env/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	cd build/wheel && env/bin/oneflare compare fedavg fafi flare --seeds 1 --out demo
	cd build/wheel && env/bin/oneflare study table2 --scale smoke --dry-run && env/bin/oneflare report demo

# every code block of the documentation, and every example
examples: $(STAMP)
	$(BIN)/python docs/run_blocks.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/test_examples.py

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site
	@echo "read: build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

# the concept pictures, from the library's own code; look at them before you commit
pictures: $(STAMP)
	$(BIN)/python docs/pictures.py

# torch is pinned through constraints.txt: an unpinned torch brings gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -c 'import sys; assert sys.version_info[:2] >= (3, 11), "OneFlare needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	grep -E '^(torch|numpy|packaging|protobuf)==' constraints.txt > $(VENV)/least.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable "$(EXTRAS)" \
	  || { echo "a pinned version is not to be had here; taking others that fit"; \
	       $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/least.txt --editable "$(EXTRAS)"; }
	touch $(STAMP)

headline: $(STAMP)
	$(BIN)/python -m oneflare.study.headline

# tables, figures and paper.tex from the studies' results in RESULTS; paper.pdf too where LaTeX is installed
RESULTS ?= results
paper: $(STAMP)
	$(BIN)/oneflare paper --results $(RESULTS) --out build/paper

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache
