"""Times and sizes as a person reads them, in every line and table."""

from __future__ import annotations

from datetime import timedelta


def duration(seconds: float) -> str:
    """Seconds as `[hours:]minutes:seconds`."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")


def elapsed(seconds: float) -> str:
    """Seconds with a tenth; from a minute on as `duration`."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def about(seconds: float) -> str:
    """Of what is to come: whole seconds; from a minute on as `duration`."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)


def brief(seconds: float) -> str:
    """Milliseconds with three digits; from a second on as `elapsed`."""
    return (
        f"{seconds * 1000:{'.0f' if seconds >= 0.1 else '.3g'}} ms"
        if seconds < 1
        else elapsed(seconds)
    )


def mebibytes(mib: float) -> str:
    """Whole MiB; from 1024 on GiB with a tenth."""
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def in_bytes(number: float) -> str:
    """As `mebibytes`, of bytes."""
    return mebibytes(number / 2**20)


def amount(seconds: float) -> str:
    """Of what is counted in hours of several devices: seconds, minutes or hours, with a tenth."""
    unit, size = next(
        ((unit, size) for unit, size in (("h", 3600), ("min", 60)) if seconds >= size), ("s", 1)
    )
    return f"{seconds / size:,.1f} {unit}"


def kilowatt_hours(joules: float) -> str:
    """With three digits."""
    return f"{joules / 3.6e6:.3g} kWh"
