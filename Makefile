# The short names of what one does with Wick; the build itself is CMakeLists.txt.
BUILD ?= build
JOBS ?= $(shell nproc)
CMAKE_ARGS ?= -DWICK_WERROR=OFF
TESTFLAGS ?=
BENCH ?= overhead compile
DEMOFLAGS ?=

# A sanitizer's reports end the test that caused them.
export ASAN_OPTIONS ?= detect_stack_use_after_return=1:allocator_may_return_null=1
export UBSAN_OPTIONS ?= print_stacktrace=1:abort_on_error=1
export TSAN_OPTIONS ?= halt_on_error=1

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev build demo test bench lint format asan ubsan tsan gpu-check clean

help:
	@echo 'make demo       train a convolutional network on Fashion-MNIST (DEMOFLAGS: more options)'
	@echo 'make test       build and run every test (TESTFLAGS: options of the test programs)'
	@echo 'make bench      print the figures of the benches in BENCH'
	@echo 'make lint       format, warnings under clang, static analysis; make format applies the format'
	@echo 'make asan       tests under AddressSanitizer and UBSan; also ubsan, tsan'
	@echo 'make gpu-check  the CUDA tests on this machine'
	@echo 'make clean      remove every build directory'

setup:
	@tools/setup.sh

setup-dev:
	@tools/setup.sh --dev

build: setup
	@cmake -S . -B $(BUILD) -G Ninja $(CMAKE_ARGS) >/dev/null
	@cmake --build $(BUILD) -j $(JOBS)

demo: build
	$(BUILD)/wick train --model cnn --data fashion --seed 1 $(DEMOFLAGS)

test: build
	@tests/run.sh $(BUILD) $(TESTFLAGS)

bench: build
	@for name in $(BENCH); do $(BUILD)/wick bench $$name --json || exit 1; done

lint: setup-dev
	@JOBS=$(JOBS) tools/lint.sh build-lint

format: setup-dev
	@git ls-files -z '*.c' '*.h' | xargs -0r clang-format -i

asan:
	@$(MAKE) --no-print-directory test BUILD=build-asan CMAKE_ARGS=-DWICK_SANITIZE=address

ubsan:
	@$(MAKE) --no-print-directory test BUILD=build-ubsan CMAKE_ARGS=-DWICK_SANITIZE=undefined

# Without address space randomisation, where that may be switched off: with some kernels it leaves this sanitizer
# no room for its map.
tsan:
	@$(shell setarch -R true 2>/dev/null && echo setarch -R) $(MAKE) --no-print-directory test BUILD=build-tsan CMAKE_ARGS=-DWICK_SANITIZE=thread

# A machine with a GPU may have only what was built elsewhere. The CUDA tests, then every test of the interface on the device.
# Where the command says why there is none, nothing is run.
gpu-check:
	@test -x $(BUILD)/wick-tests || $(MAKE) --no-print-directory build
	@why=$$($(BUILD)/wick info 2>/dev/null | awk '$$1 == "cuda" { sub(/^ *cuda +/, ""); print; exit }'); \
	case "$$why" in '' | available) ;; *) echo "gpu-check: $$why" >&2; exit 1 ;; esac; \
	status=0; WICK_REQUIRE_CUDA=1 $(BUILD)/wick-tests --jobs $(JOBS) --filter cuda $(TESTFLAGS) || status=1; \
	WICK_TEST_DEVICE=cuda WICK_REQUIRE_CUDA=1 $(BUILD)/wick-api-tests --jobs $(JOBS) $(TESTFLAGS) || status=1; exit $$status

clean:
	rm -rf build build-asan build-ubsan build-tsan build-lint
