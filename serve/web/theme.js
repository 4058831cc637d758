// The chosen theme, before anything is painted: a module would come too late.
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "auto";
