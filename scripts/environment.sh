# Sourced by quickstart.sh and test.sh: makes sure that the virtual environment exists and matches the project.
#
#   ensure_environment EXTRAS...    installs the project with these extras into $VENV, quietly
#
# REPLAYSSM_VENV  where the environment lives   (default: .venv in the project)
# PYTHON          interpreter that creates it   (default: python3; 3.10 to 3.13)

VENV="${REPLAYSSM_VENV:-$PWD/.venv}"

# Idle OpenMP threads that spin take the processor from those that work wherever cores are shared.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

fail() {
    echo "error: $*" >&2
    exit 1
}

ensure_environment() {
    local extras stamp log
    extras="$(IFS=,; echo "$*")"
    stamp="$(cat pyproject.toml constraints.txt | cksum)"
    if [ "$(cat "$VENV/.replayssm-project" 2>/dev/null)" != "$PWD" ]; then
        rm -f "$VENV"/.replayssm-* # what is installed there is another copy of the project, or this one before it moved
    fi
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.replayssm-$extras" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    log="$(mktemp)"
    trap 'rm -f "$log"' EXIT
    echo "Installing into ${VENV#"$PWD"/} (once; a few minutes)" >&2
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        create_environment "$log" # there is none, or its creation was interrupted
    fi
    supported "$VENV/bin/python" ||
        fail "${VENV#"$PWD"/} has $("$VENV/bin/python" -V), but Python 3.10 to 3.13 is needed: remove it and run this again"
    if ! "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extras]" >"$log" 2>&1; then
        cat "$log" >&2
        fail "the installation failed; the output above says why"
    fi
    rm -f "$log"
    trap - EXIT
    echo "$PWD" >"$VENV/.replayssm-project"
    echo "$stamp" >"$VENV/.replayssm-$extras"
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
}

create_environment() {
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "$python was not found: install Python 3.10 to 3.13 or set PYTHON"
    supported "$python" ||
        fail "$python is $("$python" -V 2>&1), but Python 3.10 to 3.13 is needed: set PYTHON to another interpreter"
    "$python" -m venv --clear "$VENV" >"$1" 2>&1 ||
        { cat "$1" >&2; fail "$python could not create a virtual environment (Debian: install python3-venv)"; }
}
