# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0-or-later
#
# Runs test programs that speak TAP (GLib's do with --tap) and counts.
# Sourced by tests/qtest/run and tests/qemu/run.

tap_passed=0
tap_failed=0
tap_skipped=0

# tap_run PROGRAM [ARG...]: runs it with --tap; prints its test lines, and all
# it said where something failed.
tap_run() {
    local log code=0 failed skipped passed why
    log=$(mktemp)
    printf '# %s\n' "$(basename "$1")"
    # not as long as it takes on any machine, but a program that hangs ends
    timeout --kill-after=20 "${TAP_TIMEOUT:-600}" "$1" --tap "${@:2}" \
        >"$log" 2>&1 </dev/null || code=$?
    grep -aE '^[[:space:]]*(not )?ok [0-9]+' "$log" || true
    failed=$(grep -acE '^[[:space:]]*not ok [0-9]+' "$log" || true)
    skipped=$(grep -acE '^[[:space:]]*ok [0-9]+ .*# SKIP' "$log" || true)
    passed=$(grep -acE '^[[:space:]]*ok [0-9]+' "$log" || true)
    passed=$((passed - skipped))
    # an abort or a timeout has no line of its own
    if [ "$code" -ne 0 ] && [ "$failed" -eq 0 ]; then
        failed=1
        # on the line itself: a report's end may be all that is seen of it
        why=$(grep -aE 'Bail out!|ERROR|QEMU death' "$log" | head -n 2 |
              tr '\n' ' ' | cut -c 1-400) || true
        printf 'not ok %s: exit code %d after %d tests: %s\n' \
            "$(basename "$1")" "$code" "$((passed + skipped))" "$why"
    elif [ $((passed + skipped + failed)) -eq 0 ]; then
        failed=1
        printf 'not ok %s: ran no test\n' "$(basename "$1")"
    fi
    [ "$failed" -eq 0 ] || tail -n 40 "$log"
    rm -f "$log"
    tap_passed=$((tap_passed + passed))
    tap_failed=$((tap_failed + failed))
    tap_skipped=$((tap_skipped + skipped))
}

# tap_summary: the closing line; fails if a test failed.
tap_summary() {
    printf '%d passed, %d failed, %d skipped\n' \
        "$tap_passed" "$tap_failed" "$tap_skipped"
    [ "$tap_failed" -eq 0 ] && [ "$tap_passed" -gt 0 ]
}
