"""Environment layers: EROFS images, their store and their mounts."""
