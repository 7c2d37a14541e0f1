"""The tables of the catalog, and how they came to be."""

from __future__ import annotations

# See `Database`: append-only, so the first ones speak of what is now called otherwise.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE scopes (
             scope INTEGER PRIMARY KEY, namespace TEXT NOT NULL, fingerprint TEXT NOT NULL,
             UNIQUE (namespace, fingerprint))""",
        """CREATE TABLE variants (
             scope INTEGER NOT NULL, chunk_id TEXT NOT NULL, variant_id TEXT NOT NULL,
             birth_prefix BLOB NOT NULL, tokens INTEGER NOT NULL, tokens_digest TEXT NOT NULL,
             inter BLOB NOT NULL, intra REAL NOT NULL, cci REAL NOT NULL, exact_share REAL NOT NULL,
             session TEXT, codec TEXT NOT NULL, nbytes INTEGER NOT NULL, file_bytes INTEGER NOT NULL,
             reuse_frequency REAL NOT NULL, created REAL NOT NULL,
             worth REAL GENERATED ALWAYS AS ((1.0 + reuse_frequency) * (1.0 + exact_share)) VIRTUAL,
             PRIMARY KEY (scope, chunk_id, variant_id)) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX variants_by_id ON variants (variant_id)",
        "CREATE INDEX variants_by_worth ON variants (worth, created)",
        "CREATE TABLE token_scores (variant_id TEXT PRIMARY KEY, scores BLOB NOT NULL)",
        """CREATE TABLE files_at_risk (
             variant_id TEXT NOT NULL, created REAL NOT NULL, writer TEXT NOT NULL, reserved_bytes INTEGER NOT NULL,
             PRIMARY KEY (variant_id, created)) WITHOUT ROWID""",
        # Kept by triggers, so the sums are exact in every transaction of every process and cost nothing to read.
        "CREATE TABLE totals (variants INTEGER NOT NULL, file_bytes INTEGER NOT NULL)",
        "INSERT INTO totals VALUES (0, 0)",
        "CREATE TABLE limits (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
        """CREATE TRIGGER variant_added AFTER INSERT ON variants BEGIN
             UPDATE totals SET variants = variants + 1, file_bytes = file_bytes + new.file_bytes; END""",
        """CREATE TRIGGER variant_removed AFTER DELETE ON variants BEGIN
             UPDATE totals SET variants = variants - 1, file_bytes = file_bytes - old.file_bytes;
             DELETE FROM token_scores WHERE variant_id = old.variant_id; END""",
    ),
    # A second table rather than a column of `token_scores`: a row there has scores of eq. 14, which a chunk without
    # an origin prefix lacks, and a process that still runs the version before would fail to insert.
    (
        "CREATE TABLE token_received (variant_id TEXT PRIMARY KEY, scores BLOB NOT NULL)",
        "DROP TRIGGER variant_removed",
        """CREATE TRIGGER variant_removed AFTER DELETE ON variants BEGIN
             UPDATE totals SET variants = variants - 1, file_bytes = file_bytes - old.file_bytes;
             DELETE FROM token_scores WHERE variant_id = old.variant_id;
             DELETE FROM token_received WHERE variant_id = old.variant_id; END""",
    ),
    ("ALTER TABLE variants ADD COLUMN primed INTEGER NOT NULL DEFAULT 0",),
    # Checksums over what never changes in a row, and over its token scores. NULL in rows of before, and in those of a
    # process that still runs the version before: the next opening adds the first, once the fields are verified.
    (
        "ALTER TABLE variants ADD COLUMN row_sum INTEGER",
        "ALTER TABLE variants ADD COLUMN scores_sum INTEGER",
        "CREATE INDEX variants_without_sum ON variants (variant_id) WHERE row_sum IS NULL",
    ),
    # The eviction score as a plain column, so that it may depend on more than its own row. Not NOT NULL: of a damaged
    # row it may be no number.
    (
        "ALTER TABLE variants RENAME COLUMN birth_prefix TO origin_prefix",
        "DROP INDEX variants_by_worth",
        "ALTER TABLE variants DROP COLUMN worth",
        "ALTER TABLE variants ADD COLUMN score REAL",
        "UPDATE variants SET score = (1.0 + reuse_frequency) * (1.0 + exact_share)",
        "CREATE INDEX variants_by_score ON variants (score, created)",
    ),
    # What eviction needs besides f_r: computation saved, the clock that scores are counted from, and how much was saved
    # by chunks that had to leave. Rows of before were used or not; how well is not known. Their scores are of no policy
    # that has a name, so the first opening makes them anew.
    (
        "ALTER TABLE variants ADD COLUMN saved REAL NOT NULL DEFAULT 0.0",
        "UPDATE variants SET saved = 1.0 WHERE reuse_frequency > 0.0",
        "CREATE TABLE eviction (policy TEXT NOT NULL, clock REAL NOT NULL)",
        "INSERT INTO eviction VALUES ('', 0.0)",
        """CREATE TABLE departed (
             place INTEGER PRIMARY KEY, scope INTEGER NOT NULL, chunk_id TEXT NOT NULL,
             reuse_frequency REAL NOT NULL, saved REAL NOT NULL, UNIQUE (scope, chunk_id))""",
    ),
)
