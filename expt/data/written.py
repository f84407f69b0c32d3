"""Ways in which a column's texts are written that are numbers: local numbers, and dates."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence

_EPOCH = datetime.date(1970, 1, 1).toordinal()
_SIGNS = r"[ \u00a0\u202f'\u2019{}]"
"""Characters between thousands, apart from the one that a way has for itself."""
_TIME = r"([T ]([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d(?:\.\d+)?))? ?(Z|[+-]\d\d(?::?\d\d)?|))?"
_CLOCK = re.compile(
    r"(?:(\d{4}-\d\d-\d\d)[ T])?(\d\d:\d\d:\d\d)(?:\.(\d+))? ?(Z|[+-]\d\d(?::?\d\d)?|)", re.ASCII
)
"""A time with its day, its fraction of a second and its offset, if it has them."""
PARTS = ("year", "month", "weekday", "days")
"""Numbers that a date becomes; a Monday is 0, and days are since 1970."""


def _number(point: str, sign: str) -> Callable[[str], tuple[float, ...] | None]:
    grouped = rf"[1-9]\d{{0,2}}(?P<sign>{_SIGNS.format(sign)})\d{{3}}((?P=sign)\d{{3}})*"
    lakhs = r"|[1-9]\d?(,\d\d)+,\d{3}" if sign == "," else ""
    whole, part = rf"({grouped}{lakhs}|0|[1-9]\d*)", re.escape(point)
    form = rf"[+-]?({whole}({part}\d*)?|{part}\d+)([eE][+-]?\d+)?"

    def read(text: str) -> tuple[float, ...] | None:
        if not re.fullmatch(form, text, re.ASCII):  # compiled once, and not at the import
            return None
        return (float(re.sub(_SIGNS.format(sign), "", text).replace(point, ".")),)

    return read


def _date(form: str) -> Callable[[str], tuple[float, ...] | None]:
    def read(text: str) -> tuple[float, ...] | None:
        if not (found := re.fullmatch(form + _TIME, text, re.ASCII)):
            return None
        hours, minutes, seconds, offset = found.groups()[-4:]
        second = 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds or 0)
        if offset and offset != "Z":
            digits = offset[1:].replace(":", "").ljust(4, "0")
            away = 3600 * int(digits[:2]) + 60 * int(digits[2:])
            second -= away if offset[0] == "+" else -away
        try:
            day = datetime.date(*(int(found[name]) for name in "ymd"))
            day += datetime.timedelta(days=second // 86400)
        except (ValueError, OverflowError):
            return None
        days = day.toordinal() - _EPOCH + second % 86400 / 86400
        return day.year, day.month, day.weekday(), days

    return read


_YEAR, _MONTH, _DAY = r"(?P<y>\d{4})", r"(?P<m>\d\d?)", r"(?P<d>\d\d?)"
WAYS: Mapping[str, Callable[[str], tuple[float, ...] | None]] = {
    "1,234.5": _number(".", ","),
    (LOCAL := "1.234,5"): _number(",", "."),
    "year-month-day": _date(rf"{_YEAR}([-/.]){_MONTH}\2{_DAY}"),
    "day.month.year": _date(rf"{_DAY}([-/.]){_MONTH}\2{_YEAR}"),
    "month/day/year": _date(rf"{_MONTH}([-/]){_DAY}\2{_YEAR}"),
}
"""Functions that return the numbers in a text, or None where it is not written so."""


ODD = 0.1
"""The share of texts that may be written otherwise, and are then refused by their rows."""


def ways_of(texts: Sequence[str]) -> list[str]:
    """Return the ways in which all texts may be written, or else nearly all.

    Signs between thousands alone show no number: they may be those of a code.
    """
    others, has_comma, has_point = dict.fromkeys(WAYS, 0), False, False
    for text in texts:
        read = [way for way in others if WAYS[way](text) is not None]
        has_comma = has_comma or (bool(read) and "," in text)
        has_point = has_point or ("." in text and re.search(_SIGNS.format(""), text) is not None)
        others = {way: number + (way not in read) for way, number in others.items()}
        others = {way: number for way, number in others.items() if number <= ODD * len(texts)}
        if not others:
            return []
    shown = {"1,234.5": has_comma or has_point, "1.234,5": has_comma}
    found = {way: number for way, number in others.items() if shown.get(way, True)}
    return [way for way, number in found.items() if number == min(found.values())]


def plain_time(text: str) -> str:
    """Return a time as pandas writes it, without zeros at its end: midnight is a date."""
    if not (found := _CLOCK.fullmatch(text)):
        return ""
    day, time, fraction, offset = found.groups("")
    fraction = fraction.rstrip("0")
    if day and time == "00:00:00" and not fraction + offset:
        return day
    if offset:
        digits = "+0000" if offset == "Z" else offset.replace(":", "").ljust(5, "0")
        offset = f"{digits[:3]}:{digits[3:]}"
    seconds = f"{time}.{fraction}" if fraction else time
    return f"{day} {seconds}{offset}".strip()


def is_date(way: str) -> bool:
    """Return whether the way is one of dates, which become `PARTS`."""
    return "year" in way
