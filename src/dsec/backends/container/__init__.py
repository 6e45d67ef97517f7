"""Container sandboxes: namespaces, overlay on EROFS, cgroups, aether."""
