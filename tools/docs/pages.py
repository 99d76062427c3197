"""Lays out the pages of the docs site: pages.py FOLDER.

The folder has the reference of the contract already. README.md, docs and the other pages that README.md's list of docs names are added, as they are but for links to what has
no page, which lead to the repository. FOLDER.yml becomes the generator's configuration: mkdocs.yml, and as the navigation that list.
"""

import glob
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys

repository = "https://github.com/kvcast/kvcast"
contract = "proto/kvcast/v1"
link = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
tools = os.path.dirname(os.path.abspath(__file__))
into = os.path.abspath(sys.argv[1])
os.chdir(os.path.join(tools, "..", ".."))
revision = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()


def target_of(path):
    """Returns the page of a file, or its address in the repository. A file of the contract has a page in the reference."""
    for page in (path, path + ".md"):
        if os.path.isfile(os.path.join(into, page)):
            return page
    return f"{repository}/{'tree' if os.path.isdir(path) else 'blob'}/{revision}/{path}"


def rewrite(page):
    folder = posixpath.dirname(page)

    def target(match):
        text, path, anchor = match[1], posixpath.normpath(posixpath.join(folder, match[2])), match[3] or ""
        if not os.path.exists(path):
            return match[0]
        to = target_of(path)
        return f"[{text}]({to if '://' in to else posixpath.relpath(to, folder or '.')}{anchor})"

    with open(page, encoding="utf-8") as file:
        text = file.read()
    with open(os.path.join(into, page), "w", encoding="utf-8") as file:
        file.write(link.sub(target, text))


with open("README.md", encoding="utf-8") as readme:
    groups = re.findall(r"^\| ([^|]+) \| (\[.*) \|$", readme.read().split("\n## Documentation\n")[1], re.M)
groups = [(name, link.findall(links)) for name, links in groups]

pages = {"README.md", *glob.glob("docs/*.md")} | {path for _, links in groups for _, path, _ in links if path.endswith(".md")}
shutil.copytree("docs", os.path.join(into, "docs"))
for page in pages:
    shutil.copy(page, os.path.join(into, page))
for page in pages:
    rewrite(page)


def entry(path):
    if path == contract:
        files = os.listdir(os.path.join(into, contract))
        return [f"{contract}/{file}" for file in sorted(files, key=lambda file: ("_service" not in file, file))]
    return target_of(path)


nav = [{"Overview": "README.md"}]
nav += [{"For " + name: [{title if title[1].isupper() else title[0].upper() + title[1:]: entry(path)} for title, path, _ in links]} for name, links in groups]
with open(os.path.join(tools, "mkdocs.yml"), encoding="utf-8") as settings, open(into + ".yml", "w", encoding="utf-8") as file:
    file.write(settings.read() + "nav: " + json.dumps(nav) + "\n")
