#!/usr/bin/env bash
# Make a folder with an aarch64 Python and the wheels of requirements.txt, in which tests/runtime/machine/test_arm.py trains:
# bash tests/support/arm_root.sh runs/arm_root
# It runs on Debian, needs pip, but not root, and takes 6 GB.
set -euo pipefail
requirements=$(realpath "$(dirname "$0")/../../requirements.txt")
mkdir -p "$1" && cd "$1"

# Debian's packages, by an apt of its own, which takes nothing for installed and leaves the machine's lists alone.
mkdir -p apt/lists/partial apt/archives/partial
touch apt/status
apt=(apt-get --quiet --quiet -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Debug::NoLocking=true
    -o Dir::State::status="$PWD/apt/status" -o Dir::State::lists="$PWD/apt/lists" -o Dir::Cache="$PWD/apt")
"${apt[@]}" update
"${apt[@]}" --yes --no-install-recommends --download-only install python3 libstdc++6
for package in apt/archives/*.deb; do dpkg-deb --extract "$package" .; done
rm -r apt

# Wheels name the oldest glibc that they run with; pip accepts the names that it is given.
version=$(basename usr/bin/python3.*[0-9])
platforms=(--platform manylinux2014_aarch64)
for minor in {17..36}; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
"${PYTHON:-python3}" -m pip install --quiet --no-compile --no-warn-conflicts --target "usr/local/lib/$version/dist-packages" \
    --python-version "${version#python}" --implementation cp "${platforms[@]}" --only-binary=:all: -r "$requirements"

# qemu shows a program these files in place of the host's, from which libraries learn the processor: a Neoverse N1.
mkdir -p proc
for cpu in 0 1; do
    registers=sys/devices/system/cpu/cpu$cpu/regs/identification
    mkdir -p "$registers"
    echo 0x00000000413fd0c1 > "$registers/midr_el1"
    printf '%s\t: %s\n' processor "$cpu" BogoMIPS 50.00 \
        Features "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp" \
        "CPU implementer" 0x41 "CPU architecture" 8 "CPU variant" 0x3 "CPU part" 0xd0c "CPU revision" 1
    echo
done > proc/cpuinfo
