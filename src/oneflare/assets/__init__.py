"""The page that `oneflare serve` shows."""
