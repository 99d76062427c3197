"""Reads a wheel of vLLM: wheel.py overrides|date WHEEL.

  overrides  prints the packages that it requires of a build that only another index has, as torch==2.13.0+cpu, with the version that PyPI has
  date       prints the day on which it was built: packages of later days may not work with it
"""

import email
import re
import sys
import zipfile

what, path = sys.argv[1:]
with zipfile.ZipFile(path) as wheel:
    metadata = next(i for i in wheel.infolist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", i.filename))
    required = email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist", [])
if what == "overrides":
    found = (re.match(r"([\w.-]+) *==([^+;, ]+)\+", r) for r in required if "extra ==" not in r)
    print("\n".join(sorted({f"{m[1]}=={m[2]}" for m in found if m})))
else:
    print("{:04}-{:02}-{:02}".format(*metadata.date_time))
