"""How fast Postroom is, beside a floor measured in the same run.

`python -m bench` runs every row and writes RESULTS.md. A floor is the least that the same promise
costs on the same stack and the same disk: a bare commit, a bare request, a bare turn loop. No
figure here means much without its floor, and none is kept whose commits did not reach the disk.

- `plan` says which measurements there are and what they are held against.
- `measure` is the process that makes one of them; `commits`, `turns`, `memory` and `process` how.
- `floor` is the bare turn loop. It imports nothing of Postroom.
- `counting` counts the fsyncs of whatever runs, floors and Postroom alike.
- `results` turns figures into tables.
"""
