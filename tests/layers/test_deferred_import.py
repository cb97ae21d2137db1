"""A module that is imported when it is used: the same to whoever uses it."""

import subprocess
import sys

SCRIPT = """
import sys
from quantload.layers.deferred_import import defer_import
defer_import("fractions", "Fraction", "gcd")
deferred = sys.modules["fractions"]
{0}
"""


def run(body):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_naming_a_function_imports_nothing_and_calling_it_does():
    said = run(
        "from fractions import Fraction\n"
        "print(sys.modules['fractions'] is deferred)\n"
        "print(Fraction(6, 4), sys.modules['fractions'] is deferred)"
    )
    assert said == ["True", "3/2", "False"]


def test_other_attributes_are_those_of_the_module():
    said = run(
        "import fractions\n"
        "found = fractions.Decimal\n"
        "print(found.__name__, sys.modules['fractions'].Decimal is found)"
    )
    assert said == ["Decimal", "True"]


def test_submodules_of_a_deferred_package_are_found():
    said = run(
        "defer_import('wsgiref')\n"
        "from wsgiref.headers import Headers\n"
        "import wsgiref\n"
        "print(len(Headers([])), wsgiref.headers.Headers is Headers)"
    )
    assert said == ["0", "True"]


def test_what_is_not_installed_stays_so():
    assert run("defer_import('no_such.module')\nprint('no_such.module' in sys.modules)") == [
        "False"
    ]


def test_what_is_imported_already_stays():
    assert run(
        "import calendar\n"
        "defer_import('calendar', 'isleap')\n"
        "print(calendar is sys.modules['calendar'])"
    ) == ["True"]
