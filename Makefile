# Four commands: `make demo`, `make test`, `make lint`, `make bench`. Each installs what it needs first.
.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-kernels lint bench soak setup agent sync clean

PY := .venv/bin/python

setup:
	@scripts/setup

agent: setup
	@$(MAKE) --no-print-directory -s -C agent

# The main job: 200 rollouts of a scripted agent in fresh sandboxes (demo/).
demo: agent
	@$(PY) demo/run.py

# Everything that CI runs. Kernel tests need root.
test: agent
	@scripts/test

# Unit tests alone: no root, seconds.
test-fast: setup
	@$(PY) -m pytest -q -m "not kernel and not slow"

# The older mount path and cgroup v2, in a small VM with the distribution's own kernel.
test-kernels: agent
	@scripts/test-kernels

lint: setup
	@scripts/lint

# Prints figures and ratios and rewrites docs/benchmarks.md. Fails on no time.
bench: agent
	@scripts/setup fuse3 docker-registry skopeo umoci
	@scripts/bench

# Long runs that are kept out of CI: 200 kills, 10,000 cycles.
soak: agent
	@$(PY) -m pytest -q -m slow

# The sync twin of the SDK is generated from the async source.
sync: setup
	@$(PY) scripts/generate_sync.py

clean:
	rm -rf build .demo
