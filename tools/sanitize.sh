#!/usr/bin/env bash
# Builds the runtime with a compiler's sanitizer, separately from the normal build, and runs tests with it.
#
#   tools/sanitize.sh address|thread PYTHON [options and files for pytest]
#   tools/sanitize.sh address|thread PYTHON --program tests/soak.py --seconds 600 --growth 2000
#
# Only csrc is instrumented. Accesses to memory and locks by PyTorch, Python and PoCL are checked only if they go
# through a function that the sanitizer's library replaces. tools/sanitize-KIND.txt suppresses reports about their code.
# The reports of all processes, including those that tests start, are shown at the end. Any report fails the run.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=$1 python=$(realpath -s "$2")
shift 2
case $kind in
  address) library=libasan.so ;;
  thread) library=libtsan.so ;;
  *) echo "sanitize: unknown sanitizer '$kind'; use address or thread" >&2; exit 2 ;;
esac
runtime=$(${CXX:-g++} -print-file-name=$library)
[ -e "$runtime" ] || { echo "sanitize: ${CXX:-g++} has no $library" >&2; exit 2; }
# Python does not load the C++ library, in which AddressSanitizer looks up __cxa_throw at startup.
preload="$runtime $(${CXX:-g++} -print-file-name=libstdc++.so.6)"

# The package with an instrumented library: links to the Python files, next to the library that is built here.
site=$PWD/build/sanitize-$kind
mkdir -p "$site"
TORCH_BACKPLANE_SANITIZE=$kind "$python" setup.py -q build_ext --build-lib "$site"
find "$site/torch_backplane" -type l -delete
(cd torch_backplane && find . -name '*.py' -o -name 'py.typed') | while read -r file; do
  mkdir -p "$site/torch_backplane/$(dirname "$file")"
  ln -sf "$PWD/torch_backplane/$file" "$site/torch_backplane/$file"
done

# Reports go to files, because pytest and tests capture the output of processes.
reports=$PWD/build/reports-$kind
rm -rf "$reports"
mkdir -p "$reports"
common=log_path=$reports/report:suppressions=$PWD/tools/sanitize-$kind.txt

# detect_leaks=0: Python does not free all memory at exit. use_sigaltstack=0: LLVM sets an alternate signal stack for
# its compiler threads, and AddressSanitizer would unmap it as its own when they end.
export ASAN_OPTIONS=$common:detect_leaks=0:allocator_may_return_null=1:use_sigaltstack=0
export UBSAN_OPTIONS=log_path=$reports/report-undefined:print_stacktrace=1
# ignore_interceptors_accesses=1: memcpy() and free() in other libraries are not checked, because the atomics that order
# them are not instrumented; their locks are intercepted. report_signal_unsafe=0: for signal handlers of Python and
# LLVM. die_after_fork=0: children forked by soak.py continue.
export TSAN_OPTIONS=$common:ignore_interceptors_accesses=1:second_deadlock_stack=1:report_signal_unsafe=0:exitcode=66
TSAN_OPTIONS+=:allocator_may_return_null=1:die_after_fork=0
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONMALLOC=malloc

# Python searches its working directory before PYTHONPATH, so run in $site, with absolute paths of tests.
root=$PWD
cd "$site"
loaded=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("torch_backplane").origin)')
[ "$loaded" = "$site/torch_backplane/__init__.py" ] || { echo "sanitize: Python imports $loaded instead" >&2; exit 1; }

# setarch -R: ThreadSanitizer needs fixed addresses. pytest's faulthandler plugin would hide its reports.
status=0
under() {
  setarch -R env LD_PRELOAD="$preload" "$python" "$@" || status=$?
}
run() {
  under -m pytest -q -c "$root/pyproject.toml" --rootdir "$root" -p no:faulthandler -p no:cacheprovider --timeout 1200 "$@"
}
if [ "${1-}" = --program ]; then
  under "$root/$2" "${@:3}"
elif [ $# -eq 0 ]; then
  run "$root"/tests/runtime/test_{allocator,allocator_model,device_faults,device_loss,host_async}.py \
    "$root"/tests/accelerator/test_{streams,threads,memory}.py "$root"/tests/drivers/test_kernel_launch.py \
    "$root"/tests/opencl/test_{plans,host_work,graph_branches}.py \
    "$root"/tests/opencl/test_dynamic_shape_guards.py::test_threads_call_one_operator_with_changing_shapes
  run --on opencl "$root"/tests/accelerator/test_{streams,threads,memory}.py
else
  given=()
  for one in "$@"; do
    [ ! -e "$root/${one%%::*}" ] || one=$root/$one
    given+=("$one")
  done
  run "${given[@]}"
fi

found=$(find "$reports" -type f | sort)
if [ -n "$found" ]; then
  cat $found
  echo "sanitize: $(cat $found | grep -cE 'WARNING: ThreadSanitizer|AddressSanitizer: |runtime error:') reports, in $reports" >&2
  exit 1
fi
exit $status
