// Shows the runbook; each alert's heading is a target of its name.
const place = document.getElementById("runbook");
const text = await (await fetch("runbook.md")).text();
place.innerHTML = DOMPurify.sanitize(marked.parse(text.replaceAll("HOST", location.host)));
for (const heading of place.querySelectorAll("h2")) heading.id = heading.textContent;
document.getElementById(location.hash.slice(1))?.scrollIntoView();
