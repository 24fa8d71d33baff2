#!/usr/bin/env bash
# Runs a command on another implementation of OpenCL, and on no other one. What that takes is installed once, out of the
# loader's sight (/etc/OpenCL/vendors), so that no other program on this machine notices it.
#
#   tools/opencl.sh intel|rusticl|oclgrind VENV COMMAND...
#
# intel: Intel's runtime for processors, from PyPI. rusticl: Mesa's, with its driver for processors, from Debian.
# oclgrind: a simulator that reports races and accesses out of bounds, from Debian.
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
    echo "this needs:  apt-get $*" >&2
    exit 1
  }
}

if [ ! -e "$place/.ready" ]; then
  rm -rf "$place"
  mkdir -p "$vendors"
  case $name in
    intel)
      # Not into the environment itself, whose lib/ has libraries of the same names.
      "$venv/bin/python" -m pip install -q --disable-pip-version-check --prefix "$place/root" \
        intel-opencl-rt intel-cmplr-lib-rt
      library=$place/root/lib/libintelocl.so
      ;;
    rusticl) # unpacked: once installed, every OpenCL program would see it
      apt update
      apt satisfy "$(apt-cache show mesa-opencl-icd | sed -n 's/^Depends: //p' | head -1)"
      (cd "$place" && apt-get download -q mesa-opencl-icd && dpkg -x mesa-opencl-icd_*.deb root)
      library=$place/root/usr/lib/$(gcc -print-multiarch)/libRusticlOpenCL.so.1
      ;;
    oclgrind) # puts nothing into /etc/OpenCL/vendors
      apt update
      apt install oclgrind
      library=/usr/lib/oclgrind/liboclgrind-rt-icd.so
      ;;
    *)
      echo "there is intel, rusticl and oclgrind, and not '$name'" >&2
      exit 2
      ;;
  esac
  echo "$library" >"$vendors/$name.icd"
  touch "$place/.ready"
fi
export OCL_ICD_VENDORS=$vendors RUSTICL_ENABLE=llvmpipe
exec "$@"
