#!/usr/bin/env bash
# Builds the socket under a compiler's sanitizer, beside the ordinary build, and runs tests with it.
#
#   tools/sanitize.sh address|thread PYTHON [options and files for pytest]
#
# Only csrc is instrumented: PyTorch, Python and PoCL are not, so what they do with our memory and locks is only seen where
# it goes through a function that the sanitizer's library replaces. What is theirs is in tools/sanitize-KIND.txt, with reasons.
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

# The package as it is, with another compiled part: links to our files beside the library that is built there.
site=$PWD/build/sanitize-$kind
mkdir -p "$site"
TORCH_BACKPLANE_SANITIZE=$kind "$python" setup.py -q build_ext --build-lib "$site"
find "$site/torch_backplane" -type l -delete
(cd torch_backplane && find . -name '*.py' -o -name 'py.typed') | while read -r file; do
  mkdir -p "$site/torch_backplane/$(dirname "$file")"
  ln -sf "$PWD/torch_backplane/$file" "$site/torch_backplane/$file"
done

# detect_leaks: Python leaves what it has at the end. report_mutex_bugs: at the end of the process PyTorch's dispatcher is seen
# to give up a lock that it was not seen to take; races and the order of locks are reported all the same.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:allocator_may_return_null=1:suppressions=$PWD/tools/sanitize-address.txt
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=0:exitcode=66:report_signal_unsafe=0:report_mutex_bugs=0:second_deadlock_stack=1:suppressions=$PWD/tools/sanitize-thread.txt
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONMALLOC=malloc

if [ $# -eq 0 ]; then
  set -- tests/test_allocator.py tests/test_allocator_model.py tests/test_streams.py tests/test_threads.py \
    tests/test_memory.py tests/test_device_faults.py tests/test_device_loss.py tests/test_kernel_launch.py \
    tests/opencl/test_plans.py tests/opencl/test_host_work.py
fi
# setarch: ThreadSanitizer needs to know where things are. The options of faulthandler would hide the reports.
exec setarch -R env LD_PRELOAD="$runtime" "$python" -m pytest -q -p no:faulthandler --timeout 1200 "$@"
