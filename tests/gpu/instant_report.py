"""pytest plugin (`-p instant_report`): prints a failure when it happens, so that a run that is cut off tells why."""


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        print(f"\nFAILED NOW {report.nodeid}: {crash.message[:600] if crash else report.longrepr}", flush=True)
