"""The history of the tables, one file a revision in `versions`, in the order of their numbers.

`storage.migrate` runs them; no alembic.ini is needed. A new revision is a new file: `down_revision` names the one
before, `upgrade` changes the tables (`op.batch_alter_table` where SQLite cannot alter), and released files are never
edited. All pending revisions run in one transaction with foreign keys off and end in a check of all references.
Triggers of a table that is recreated are lost and must be created again by the same revision.
"""
