#!/usr/bin/env bash
# Builds the runtime under a compiler's sanitizer, beside the ordinary build, and runs tests with it.
#
#   tools/sanitize.sh address|thread PYTHON [options and files for pytest]
#   tools/sanitize.sh address|thread PYTHON --program tests/soak.py --seconds 600 --growth 2000
#
# Only csrc is instrumented: PyTorch, Python and PoCL are not, so what they do with our memory and locks is only seen where
# it goes through a function that the sanitizer's library replaces. What is theirs is in tools/sanitize-KIND.txt, with reasons.
# Reports of all processes, those that tests start too, are collected and shown at the end: any fails the run.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=$1 python=$(realpath -s "$2")
shift 2
case $kind in
  address) library=libasan.so ;;
  thread) library=libtsan.so ;;
  *) echo "sanitize: $kind is neither address nor thread" >&2; exit 2 ;;
esac
runtime=$(${CXX:-g++} -print-file-name=$library)
[ -e "$runtime" ] || { echo "sanitize: ${CXX:-g++} has no $library" >&2; exit 2; }
# Python does without C++'s library, in which AddressSanitizer looks for what throws exceptions when it starts.
preload="$runtime $(${CXX:-g++} -print-file-name=libstdc++.so.6)"

# The package as it is, with another compiled part: links to our files beside the library that is built there.
site=$PWD/build/sanitize-$kind
mkdir -p "$site"
TORCH_BACKPLANE_SANITIZE=$kind "$python" setup.py -q build_ext --build-lib "$site"
find "$site/torch_backplane" -type l -delete
(cd torch_backplane && find . -name '*.py' -o -name 'py.typed') | while read -r file; do
  mkdir -p "$site/torch_backplane/$(dirname "$file")"
  ln -sf "$PWD/torch_backplane/$file" "$site/torch_backplane/$file"
done

# To files, since pytest and tests keep what processes write.
reports=$PWD/build/reports-$kind
rm -rf "$reports"
mkdir -p "$reports"
common=log_path=$reports/report:suppressions=$PWD/tools/sanitize-$kind.txt

# detect_leaks: Python leaves what it has at the end. use_sigaltstack: LLVM gives threads that compile another stack for
# signals, and at their end AddressSanitizer would unmap that for its own.
export ASAN_OPTIONS=$common:detect_leaks=0:allocator_may_return_null=1:use_sigaltstack=0
export UBSAN_OPTIONS=log_path=$reports/report-undefined:print_stacktrace=1
# ignore_interceptors_accesses: what others do to memory by memcpy() and free() is not looked at, because their atomics are not
# seen that order it; their locks are seen. report_signal_unsafe: Python's and LLVM's handlers. die_after_fork: children that
# soak.py forks go on.
export TSAN_OPTIONS=$common:ignore_interceptors_accesses=1:second_deadlock_stack=1:report_signal_unsafe=0:exitcode=66
TSAN_OPTIONS+=:allocator_may_return_null=1:die_after_fork=0
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONMALLOC=malloc

# The folder that Python is started in comes before PYTHONPATH, so it is this one; and what is given is named from here.
root=$PWD
cd "$site"
loaded=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("torch_backplane").origin)')
[ "$loaded" = "$site/torch_backplane/__init__.py" ] || { echo "sanitize: $loaded would be tested" >&2; exit 1; }

# setarch: ThreadSanitizer needs to know where things are. The options of faulthandler would hide the reports.
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
  run "$root"/tests/test_{allocator,allocator_model,streams,threads,memory,device_faults,device_loss,kernel_launch,host_places}.py \
    "$root"/tests/opencl/test_{plans,host_work,graph_branches}.py \
    "$root"/tests/opencl/test_dynamic_shape_guards.py::test_threads_call_one_operator_with_ever_new_shapes
  run --on opencl "$root"/tests/test_{streams,threads,memory}.py
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
