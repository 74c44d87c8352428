#!/usr/bin/env bash
# A relation that is used twice gives the same numbers of a sequence twice: rows of two tables share their ids.
#
# Package:   duckdb 2.0.0; 1.5.0 is shown for comparison
# Expected:  A sequence never gives a number twice (PostgreSQL, and duckdb 1.5). A relation is evaluated anew on each
#            use, as duckdb 2.0 says in the message for the removed fetchone(), so each use continues the sequence.
# What is:   nextval() is evaluated when the relation is used first; later uses of the object repeat its numbers,
#            while random() and the rows of the tables are read anew. No message. The number of distinct ids of
#            a table that was filled by relation.create() and relation.insert_into() is half the number of its rows.
# Met by:    Numbering records of several files or batches with one relation: joins by id multiply rows,
#            "one row per id" drops half of them.
# Source:    duckdb/duckdb issue 1598, where a maintainer names PostgreSQL's sequences as the model; seen by running it.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages new duckdb==2.0.0
python_packages old duckdb==1.5.0

cat >"$work/run.py" <<'PY'
import duckdb

print("duckdb", duckdb.__version__)
connection = duckdb.connect()
connection.execute("create sequence ids")
connection.execute("create table proteins as select range as protein from range(4)")
numbered = connection.sql("select nextval('ids') as id, protein from proteins")
numbered.create("prepared")
numbered.insert_into("prepared")
rows, ids = connection.execute("select count(*), count(distinct id) from prepared").fetchall()[0]
print(f"  one relation, used twice:   {rows} rows, {ids} ids")
draws = connection.sql("select random() from proteins")
print(f"  random() is drawn again:    {draws.fetchall() != draws.fetchall()}")
connection.execute("create table again (id bigint, protein bigint)")
for _ in range(2):
    connection.execute("insert into again select nextval('ids'), protein from proteins")
rows, ids = connection.execute("select count(*), count(distinct id) from again").fetchall()[0]
print(f"  one statement, twice:       {rows} rows, {ids} ids")
PY
for version in old new; do "$work/$version/bin/python" "$work/run.py"; done >"$work/seen"
compare <<'END'
duckdb 1.5.0
  one relation, used twice:   8 rows, 8 ids
  random() is drawn again:    True
  one statement, twice:       8 rows, 8 ids
duckdb 2.0.0
  one relation, used twice:   8 rows, 4 ids
  random() is drawn again:    True
  one statement, twice:       8 rows, 8 ids
END
