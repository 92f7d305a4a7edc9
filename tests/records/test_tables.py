"""The format of numbers in tables and log lines."""

import math

from runner.records.tables import format_number


def test_numbers_have_at_most_six_significant_digits() -> None:
    for value, text in {
        0.0: "0.0000",
        0.00001234: "1.234e-05",
        0.4: "0.4000",
        -99.98765: "-99.9877",
        123.456789: "123.457",
        1234.56789: "1,234.57",
        123456.789: "123,457",
        64_883_637.2: "6.48836e+07",
        1.23456789e153: "1.23457e+153",
        math.inf: "inf",
    }.items():
        assert format_number(value) == text
    assert format_number(1234) == "1,234" and format_number(64_883_637) == "6.48836e+07"
    assert format_number(3.21, like=1234.5) == "3.21" and format_number(1e153, like=0.5) == "1e+153"
    assert math.isnan(float(format_number(math.nan)))
