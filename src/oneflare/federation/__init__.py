"""Real federations: the charter, a member's side, the coordinator's side, the page, Flower."""
