#!/usr/bin/env bash
# Runs a command with only the given OpenCL implementation. It is installed on first use, outside of the loader's
# default folder (/etc/OpenCL/vendors), so that other programs do not use it.
#
#   tools/opencl.sh intel|rusticl|oclgrind VENV COMMAND...
#
# intel: Intel's CPU runtime, from PyPI. rusticl: Mesa's implementation with its CPU driver, from Debian. oclgrind: a
# simulator that reports races and out-of-bounds accesses, from Debian.
set -euo pipefail
name=$1
venv=$(cd "$2" && pwd)
shift 2
place=$venv/opencl/$name
vendors=$place/vendors

apt() {
  local as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "$1" -q -y --no-install-recommends "${@:2}" >/dev/null || {
    echo "opencl: this command failed; run it as root:  apt-get $*" >&2
    exit 1
  }
}

if [ ! -e "$place/.ready" ]; then
  rm -rf "$place"
  mkdir -p "$vendors"
  case $name in
    intel)
      # Not in the virtual environment itself: its lib/ has libraries with the same names.
      "$venv/bin/python" -m pip install -q --disable-pip-version-check --prefix "$place/root" \
        intel-opencl-rt intel-cmplr-lib-rt
      library=$place/root/lib/libintelocl.so
      ;;
    rusticl) # unpacked, not installed: else every OpenCL program would use it
      apt update
      apt satisfy "$(apt-cache show mesa-opencl-icd | sed -n 's/^Depends: //p' | head -1)"
      (cd "$place" && apt-get download -q mesa-opencl-icd && dpkg -x mesa-opencl-icd_*.deb root)
      library=$place/root/usr/lib/$(gcc -print-multiarch)/libRusticlOpenCL.so.1
      ;;
    oclgrind) # its package adds nothing to /etc/OpenCL/vendors
      apt update
      apt install oclgrind
      library=/usr/lib/oclgrind/liboclgrind-rt-icd.so
      ;;
    *)
      echo "opencl: unknown implementation '$name'; use intel, rusticl or oclgrind" >&2
      exit 2
      ;;
  esac
  echo "$library" >"$vendors/$name.icd"
  touch "$place/.ready"
fi
export OCL_ICD_VENDORS=$vendors RUSTICL_ENABLE=llvmpipe
exec "$@"
