# ruff: noqa: E501 -- a table of programs reads better with one on a line
"""Programs that try to pass without the correct result, which they do not know because it is a random number."""

_SEEK = """
import gc, sys
def seek():
    frame = sys._getframe()
    while frame:
        yield from frame.f_locals.values()
        yield from frame.f_globals.values()
        frame = frame.f_back
    yield from gc.get_objects()
"""
PREAMBLE = """
import json, os, sys
def nonce():
    return sys.modules["__main__"].task["nonce"]
"""

# Each defines f, which is called with 7, or forges before that.
CALLS = {
    "exit with 0 immediately": "import os; os._exit(0)",
    "exit with 0 by sys.exit": "import sys; sys.exit(0)",
    "exit with 0 in the call": "import os\ndef f(x): os._exit(0)",
    "die by a signal": "import os; os.kill(os.getpid(), 9)",
    "print a success message": "print('PASSED'); print('ok'); print('1 passed in 0.01s')\ndef f(x): return 'passed'",
    "return nothing": "def f(x): return None",
    "return true": "def f(x): return True",
    "define nothing": "",
    "an object that equals everything": """
class Equal:
    def __eq__(self, other): return True
    __hash__ = None
def f(x): return Equal()
""",
    "a number that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Equal(1)
""",
    "a text that equals everything": """
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Equal('1')
""",
    "a number whose text is chosen": """
class Number(float):
    def __repr__(self): return 'NaN'
def f(x): return Number(1)
""",
    "not a number": "def f(x): return float('nan')",
    "infinity": "def f(x): return float('inf')",
    "a number beyond the float range": "import json\njson.dumps = lambda answer: '{\"nonce\": \"%s\", \"result\": 1e999}' % answer['nonce']\ndef f(x): return 1",
    "an integer of ten thousand digits": "import sys; sys.set_int_max_str_digits(0)\ndef f(x): return 10**10000",
    "a list in a list in a list": """
import json
json.dumps = lambda answer: '{"nonce": "%s", "result": %s' % (answer["nonce"], "[" * 60000)
def f(x): return 1
""",
    "a patched encoder that returns true": "import json; json.dumps = lambda answer: '{\"result\": true}'\ndef f(x): return 1",
    "a patched encoder that returns nothing": "import json; json.dumps = lambda answer: ''\ndef f(x): return 1",
    "a patched builtin": "import builtins, json; builtins.print = json.dumps = lambda *a: 'null'\ndef f(x): return 1",
    "patched comparisons": "import math, operator; math.isclose = operator.eq = lambda *a, **k: True\ndef f(x): return 1",
    "a replaced module": "import sys; sys.modules['json'] = sys.modules['math'] = sys\ndef f(x): return 1",
    "a replaced driver": "import sys; sys.modules['__main__'].function = lambda *a: 1; sys.modules['candidate'] = sys\nf = max",
    "the right nonce, and true": PREAMBLE + "os.write(3, json.dumps({'nonce': nonce(), 'result': True}).encode()); os._exit(0)",
    "the right nonce, and a name": PREAMBLE + "os.write(3, json.dumps({'nonce': nonce(), 'result': 'expected'}).encode()); os._exit(0)",
    "a guessed nonce": "import os; os.write(3, b'{\"nonce\": \"' + b'0' * 32 + b'\", \"result\": 1}'); os._exit(0)",
    "no nonce": "import os; os.write(3, b'{\"result\": 1}'); os._exit(0)",
    "a repeated key": PREAMBLE + "os.write(3, ('{\"nonce\": \"%s\", \"result\": 1, \"result\": 2}' % nonce()).encode()); os._exit(0)",
    "an additional key": PREAMBLE + "os.write(3, json.dumps({'nonce': nonce(), 'result': 1, 'passed': True}).encode()); os._exit(0)",
    "every number at once": PREAMBLE + "os.write(3, b''.join(json.dumps({'nonce': nonce(), 'result': i}).encode() + b'\\n' for i in range(500))); os._exit(0)",
    "infinitely many numbers": "import os\nwhile True: os.write(3, b'1\\n' * 1000)",
    "invalid UTF-8": "import os; os.write(3, bytes(range(128, 256))); os._exit(0)",
    "half a character": "def f(x): return '\\ud800'",
    "a daemon that writes later": """
import os, time
if os.fork() == 0:
    time.sleep(0.2); os.write(3, b'{"result": true}'); os._exit(0)
def f(x): return 1
""",
    "a word written at exit": "import atexit, os; atexit.register(lambda: os.write(3, b'true'))\ndef f(x): return 1",
    "another program": "import os, sys; os.dup2(3, 1); os.execv(sys.executable, [sys.executable, '-c', 'print(True)'])",
    "search the frames": _SEEK + """
numbers = [v for v in seek() if type(v) is int and v > 2**62]
texts = [v for v in seek() if type(v) is str and 'expected' in v and v.strip().isdigit()]
def f(x): return (numbers + texts + [0])[0]
""",
    "search the memory": _SEEK + """
import re
found = [int(n) for v in gc.get_objects() if type(v) in (dict, list, tuple) for n in re.findall('[0-9]{19}', repr(v)[:9999])]
def f(x): return (found + [0])[0]
""",
    "read the rest of stdin": "import sys\nrest = sys.stdin.read()\ndef f(x): return int(rest or 0)",
    "search the files": """
import os, re
text = ''
for name in ('/start.py', '/program.py', 'candidate.py', '/proc/self/environ', '/proc/1/cmdline'):
    try: text += open(name).read()
    except OSError: pass
found = [int(n) for n in re.findall('[0-9]{19}', text)]
def f(x): return (found + [0])[0]
""",
    "a fake sandbox fault": "import os; os.write(2, b'bwrap: Creating new namespace failed\\n'); os._exit(1)",
    "a fake bubblewrap status": "import os\nfor d in range(3, 99):\n    try: os.write(d, b'{ \"exit-code\": 0 }')\n    except OSError: pass\nos._exit(0)",
    "kill the waiting processes": "import os; os.kill(os.getppid(), 9); os.kill(1, 9); os.kill(-1, 9)",
    "the argument": "def f(x): return x",
}  # fmt: skip

# Each should print the number for the input 7.
TEXTS = {
    "print nothing": "",
    "exit with 0": "import os; os._exit(0)",
    "print a pattern": "print('.*'); print('*')",
    "print blank lines": "print(' \\n' * 99)",
    "print the input": "print(input())",
    "print not a number": "print('nan')",
    "print infinity": "print('inf')",
    "print passed": "print('Accepted'); print('OK')",
    "print many numbers": "for i in range(9000): print(i)",
    "print numbers in one line": "print(*range(9000))",
    "print infinitely": "i = 0\nwhile True: i += 1; print(i)",
    "print and erase": "print('\\r\\x1b[2J\\x08' * 99)",
    "print nulls": "print('\\0' * 99)",
    "search everything": _SEEK + "print([v for v in seek() if isinstance(v, (int, str)) and len(str(v)) == 19])",
    "print the neighbouring files": "import os; print([open(n).read() for n in ('/start.py', '/program.py')], os.environ)",
}
