#!/usr/bin/env bash
# Builds the codec for aarch64 with a cross compiler and compares its bytes with this machine's.
#
#     codecs/native/tests/aarch64.sh [FOLDER]
#
# Debian: apt install g++-aarch64-linux-gnu qemu-user-static
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"
sources=("$here/same_bytes.cpp")
while IFS= read -r file; do
    case "$(basename "$file")" in *bindings.cpp | measure*) ;; *) sources+=("$file") ;; esac
done < <(find "$here/../src" -name '*.cpp' | LC_ALL=C sort)
flags=(-std=c++17 -O3 -ffp-contract=off -Wall -Wextra -Wno-uninitialized
    -Wno-maybe-uninitialized -I "$here/../src")
aarch64-linux-gnu-g++ "${flags[@]}" -Werror -static "${sources[@]}" -o "$folder/aarch64" -pthread
"${CXX:-g++}" "${flags[@]}" "${sources[@]}" -o "$folder/here" -pthread
"$folder/here" | sort -u >"$folder/here.txt"
qemu-aarch64-static "$folder/aarch64" | sort -u >"$folder/aarch64.txt"
diff "$folder/here.txt" "$folder/aarch64.txt"
echo "aarch64: $(wc -l <"$folder/aarch64.txt") frames, values and sums as here"
