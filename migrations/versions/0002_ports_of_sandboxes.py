"""Where the exposed ports of a sandbox are reached."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """A column with a default, which sandboxes from before have."""
    op.add_column("sandboxes", sa.Column("ports", sa.Text(), nullable=False, server_default=""))
