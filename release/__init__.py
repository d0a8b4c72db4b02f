"""Programs that build a release. They are no part of the product."""
