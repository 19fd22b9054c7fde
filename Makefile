# `make help` lists the targets that are meant to be called.

IS_RECENT := 'import sys; sys.exit(sys.version_info < (3, 11))'
# A version manager's python3 is a slow wrapper, so the system's own is tried first.
ifndef PYTHON
PYTHON := $(shell for python in /usr/bin/python3 python3; do \
	$$python -c $(IS_RECENT) 2>/dev/null && echo $$python && break; done)
endif

VENV := .venv
PY := $(VENV)/bin/python
TEST_SETTINGS := DJANGO_SETTINGS_MODULE=tests.settings

# A lane is named by LANE, tests by ARGS; without them every lane runs, in processes side by side.
LANE :=
WORKERS := 4
PYTEST = $(PY) -m pytest -m "$(or $(LANE),not slow)" $(if $(ARGS),,-n $(WORKERS) --dist loadfile --no-loadscope-reorder) $(ARGS)
# Of the tests that are named none may be about the database: pytest's 5 says so.
ON_SERVERS = .ci/with-servers $(PY) -m pytest -m "$(if $(LANE),$(LANE) and )database and not slow" $(ARGS) || [ $$? -eq 5 ]
EVERY_TEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
EVERY_DATABASE = .ci/with-servers $(PY) -m pytest -m "(db or database) and not one_database" $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-servers lint bench bench-quick bench-containers bench-kubernetes chaos soak e2b adapters lock bundle clean venv venv-dev bubblewrap

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /make \1\t/p' Makefile | expand -t 14

run: venv bubblewrap ## Install what is missing and serve on http://127.0.0.1:$PORT (8000); PACKAGES=no: no packages
	@# What it has made it says itself.
	@LOG_LEVEL=$${LOG_LEVEL:-WARNING} $(PY) manage.py bootstrap
	@exec $(PY) manage.py up $(if $(filter no,$(PACKAGES)),,--packages)

# Both courses at once: each waits more than it works.
define COURSES
@log=$$(mktemp) && trap 'rm -f "$$log"' EXIT && \
{ { $(2); } > "$$log" 2>&1 & } && servers=$$! && \
trap 'kill $$servers; rm -f "$$log"; exit 130' INT TERM && \
{ $(1); first=$$?; wait $$servers; servers=$$?; \
cat "$$log"; [ $$first = 0 ] && [ $$servers = 0 ]; }
endef

test: venv-dev bubblewrap lint ## Lint, and run the tests that a change must pass (LANE=unit for one lane, ARGS: pytest's)
	$(call COURSES,$(PYTEST),$(ON_SERVERS))

test-all: venv-dev bubblewrap lint ## Run every test, the long forms too, and those with a database on PostgreSQL and Redis again
	$(call COURSES,$(EVERY_TEST),$(EVERY_DATABASE))

test-servers: venv-dev bubblewrap ## Run the tests of database, queue and ledger on PostgreSQL and Redis
	@$(ON_SERVERS)

lint: venv-dev ## Check style, types, imports, wording, spelling and migrations
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-cache --no-logo
	@$(PY) -m tests.docs.wording
	@$(VENV)/bin/codespell *.md docs examples clients templates executions providers sandbox_site
	@$(TEST_SETTINGS) $(PY) manage.py makemigrations --check --dry-run
	@$(TEST_SETTINGS) $(PY) manage.py check --fail-level WARNING

bench: venv-dev bubblewrap ## Measure executions against a bare interpreter and a bare SDK, and under attack
	@$(PY) -m benchmarks.executions $(ARGS)
	@$(PY) -m benchmarks.packages
	@$(PY) -m benchmarks.templates
	@$(PY) -m benchmarks.remote
	@$(PY) -m benchmarks.bounds
	@$(PY) -m benchmarks.attacks
	@$(PY) -m benchmarks.serving
	@$(PY) -m benchmarks.sessions
	@$(PY) -m benchmarks.network
	@$(PY) -m benchmarks.e2b_door
	@$(PY) -m benchmarks.codex_door
	@$(PY) -m benchmarks.changes
	@$(PY) -m benchmarks.storage
	@DURABLE=yes .ci/with-servers $(PY) -m benchmarks.queue
	@DURABLE=yes .ci/with-servers $(PY) -m benchmarks.instances
	@.ci/with-servers $(PY) -m benchmarks.admin

bench-quick: venv-dev bubblewrap ## Say whether the working tree is slower than a commit (ARGS="--base COMMIT")
	@$(PY) -m benchmarks.quick $(ARGS)

bench-containers: venv-dev ## Measure the Docker pool against its peers (needs Docker and the images)
	@$(PY) -m benchmarks.containers $(ARGS)
	@$(PY) -m benchmarks.tenant_kernel
	@$(PY) -m benchmarks.cold_starts
	@$(PY) -m benchmarks.fresh_rate
	@$(PY) -m benchmarks.refilling --launchers bubblewrap runc gvisor docker
	@$(PY) -m benchmarks.kernels
	@$(PY) -m benchmarks.warm_images

bench-kubernetes: venv-dev bubblewrap ## Measure Pods, a control plane and PostgreSQL (needs root, Kubernetes, Docker)
	@$(PY) -m benchmarks.kubernetes $(ARGS)
	@$(PY) -m benchmarks.control_plane
	@DURABLE=yes .ci/with-servers $(PY) -m benchmarks.database
	@$(PY) -m benchmarks.capacity --read var/bench

chaos: venv-dev ## Run the randomised fault-injection test of two hosts (ARGS="--minutes 20 --seed 1")
	@$(PY) -m tests.chaos $(ARGS)

soak: venv-dev bubblewrap ## Run all long tests: chaos with every launcher, the matrices, the load
	@$(PY) -m tests.chaos.soak $(ARGS)

e2b: venv-dev bubblewrap ## Run E2B's SDKs, in every installed version, against the E2B API
	@$(PY) -m pytest tests/doors/e2b $(ARGS)

adapters: venv bubblewrap ## Run examples/adapters, each with its framework (ARGS=smolagents for one)
	@$(PY) -m tests.support.adapters $(ARGS)

lock: venv ## Compile requirements*.in (ARGS="--upgrade" for newer versions)
	@$(PY) -m pip install -qq uv
	@for name in requirements requirements-otel requirements-kubernetes requirements-dev \
			deploy/pool-requirements providers/local/packages \
			$(basename $(wildcard examples/adapters/*/requirements.in)); do \
		$(PY) -m uv pip compile $$name.in --output-file $$name.txt --quiet --universal \
			$$( case $$name in requirements*) echo --override requirements-overrides.in ;; \
				deploy/*) echo --constraint requirements.txt ;; \
				providers/*) echo --only-binary :all: ;; esac ) \
			--python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
			--custom-compile-command "make lock" $(ARGS) || exit 1; \
	done
	@cd providers/self_managed/images/nodejs && cp ../../../local/node_packages.json package-lock.json && \
		npm $(if $(findstring --upgrade,$(ARGS)),update,install) --package-lock-only --ignore-scripts --no-audit --no-fund \
			--omit-lockfile-registry-resolved && mv package-lock.json ../../../local/node_packages.json

bundle: venv ## Make one archive in var/ that installs without a network (ARGS: bundle/build.py's)
	@$(PY) bundle/build.py $(ARGS)

clean: ## Remove the virtual environment and the caches; the data stays
	@rm -rf $(VENV) .venv-adapters .venv-packages .venv-packages.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each lock that was installed is kept in the environment: installing is for when one has changed.
# A lock is whole, and pip takes the newest of what another package asks for with an extra.
venv: LOCKS := requirements.txt
venv-dev: LOCKS := requirements.txt requirements-dev.txt
venv venv-dev:
	@$(or $(PYTHON),false) -c $(IS_RECENT) 2>/dev/null || { \
		echo "Python 3.11 or newer is needed. Install it, or name it: make $@ PYTHON=..." >&2; \
		exit 1; }
	@# Debian's venv module adds setuptools, which nothing imports.
	@$(PY) -c 'import pip' 2>/dev/null || { $(PYTHON) -m venv --clear $(VENV) && \
		$(PY) -m pip uninstall -qq --yes setuptools; } || { \
		echo "$(PYTHON) lacks its venv module. On Debian: apt-get install python3-venv" >&2; \
		exit 1; }
	@changed=; for lock in $(LOCKS); do cmp -s $$lock $(VENV)/$$lock || changed=yes; done; \
	test -z "$$changed" || { \
		echo "Installing $(LOCKS) into $(VENV), which takes some minutes the first time ..."; \
		$(PY) -m pip install -qq --disable-pip-version-check --no-compile --no-deps \
			--require-hashes $(LOCKS:%=-r %) && $(PY) bundle/load.py && cp $(LOCKS) $(VENV)/; }
	@# A service that may not write beside its code would compile all of it at every start.
	@$(PY) -m compileall -q executions providers sandbox_site > /dev/null || true

bubblewrap:
	@command -v bwrap >/dev/null || sh -c '\
		command -v apt-get >/dev/null || exit 1; \
		test "$$(id -u)" = 0 || sudo="sudo -n"; \
		$$sudo true 2>/dev/null || exit 1; \
		echo "Installing bubblewrap ..."; \
		$$sudo apt-get update -qq && $$sudo apt-get install -qq -y bubblewrap >/dev/null' \
	|| echo "bubblewrap is missing, so nothing can be run locally. Install it: sudo apt-get install bubblewrap" >&2
