"""Several models behind one server: engines that are started by a request's model and unloaded when memory is short."""
