"""Real federations: the charter, the members' side, the coordinator's side, the page of a fusion, and Flower."""
