"""The builder: a local page on which launches are planned, compared, written and started."""
