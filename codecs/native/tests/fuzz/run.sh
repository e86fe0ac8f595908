#!/usr/bin/env bash
# Fuzzes every way to decode a frame, under AddressSanitizer and UndefinedBehaviorSanitizer.
#
#     codecs/native/tests/fuzz/run.sh [SECONDS for each target, 150] [FOLDER for programs, corpora]
#
# The targets start from the golden vectors and from the frames that seeds.cpp writes. With clang++
# and its libFuzzer, coverage leads the mutations; without it, or with FSL_FUZZ_PLAIN=1, g++ builds
# a driver that mutates at random. Four targets: 150 seconds each are ten minutes. An input that
# takes more than FSL_FUZZ_TIMEOUT seconds (10) of wall time counts as a fault.
#
# First, the kernels of each instruction set are compared with the plain ones (kernels_test.cpp),
# FSL_KERNEL_ROUNDS times (20).
set -euo pipefail
seconds="${1:-150}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
native="$(cd "$here/../.." && pwd)"
folder="${2:-$(mktemp -d)}"
mkdir -p "$folder/seeds"
sources=()
while IFS= read -r file; do
    case "$(basename "$file")" in *bindings.cpp | measure*) ;; *) sources+=("$file") ;; esac
done < <(find "$native/src" -name '*.cpp' | LC_ALL=C sort)
# All objects are in one folder, so the names of those of src/ contain their folders.
object_of() {
    local name="${1%.cpp}"
    case "$name" in "$native"/src/*) name="${name#"$native"/src/}" ;; *) name="${name##*/}" ;; esac
    echo "$folder/${name//\//_}.o"
}
flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -fno-sanitize-recover=all
    -I "$native/src")

probe='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
compiler="${CXX:-g++}" sanitizers=address,undefined guided=0
if [ -z "${FSL_FUZZ_PLAIN:-}" ] && command -v clang++ >/dev/null 2>&1 &&
    echo "$probe" |
    clang++ -x c++ -fsanitize=fuzzer,address,undefined -o "$folder/probe" - 2>/dev/null; then
    compiler=clang++ guided=1
fi

sanitize=-fsanitize=$sanitizers
if [ "$guided" = 1 ]; then sanitize+=,fuzzer-no-link; fi
programs=("$here/../kernels_test.cpp" "$here/seeds.cpp")
if [ "$guided" = 0 ]; then programs+=("$here/standalone.cpp"); fi
# As many at a time as there are cores; the first to fail ends it all.
for file in "${sources[@]}" "${programs[@]}"; do
    printf '%s\0' "$(object_of "$file")" "$file"
done |
    xargs -0 -n 2 -P "$(nproc 2>/dev/null || echo 1)" \
        sh -c '"$@" || exit 255' sh "$compiler" "${flags[@]}" "$sanitize" -c -o
objects=()
for file in "${sources[@]}"; do objects+=("$(object_of "$file")"); done
"$compiler" "$sanitize" "$folder"/kernels_*.o -o "$folder/kernels_test"
"$folder/kernels_test" "${FSL_KERNEL_ROUNDS:-20}"
"$compiler" "$sanitize" "$folder/seeds.o" "${objects[@]}" -o "$folder/write_seeds" -pthread
"$folder/write_seeds" "$folder/seeds"
seeds=("$native"/../../tests/vectors/*.bin "$folder"/seeds/*.bin)
if [ "$guided" = 0 ]; then objects+=("$folder/standalone.o"); fi

for entry in decode decode_bfloat16 accumulate inspect; do
    program="$folder/$entry"
    if [ "$guided" = 1 ]; then
        "$compiler" "${flags[@]}" -DFSL_FUZZ_ENTRY="$entry" -fsanitize=fuzzer,$sanitizers \
            "$here/entry.cpp" "${objects[@]}" -o "$program" -pthread
        mkdir -p "$folder/corpus-$entry"
        cp "${seeds[@]}" "$folder/corpus-$entry"
        echo "$entry: clang++, libFuzzer, $seconds s" >&2
        "$program" -max_total_time="$seconds" -max_len=262144 -rss_limit_mb=2048 \
            -timeout="${FSL_FUZZ_TIMEOUT:-10}" -print_final_stats=1 \
            -artifact_prefix="$folder/" "$folder/corpus-$entry" 2>"$folder/$entry.log" ||
            { tail -n 60 "$folder/$entry.log" >&2; exit 1; }
        grep -E "number_of_executed_units|peak_rss_mb|DONE" "$folder/$entry.log" | tail -n 3
    else
        "$compiler" "${flags[@]}" -DFSL_FUZZ_ENTRY="$entry" -fsanitize=$sanitizers \
            "$here/entry.cpp" "${objects[@]}" -o "$program" -pthread
        echo "$entry: $compiler, random mutations, $seconds s" >&2
        "$program" "$seconds" 1 "${seeds[@]}"
    fi
done
