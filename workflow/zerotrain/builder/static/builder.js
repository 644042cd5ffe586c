// Tell assistive technology which fields are wrong: their messages come with each answer.
function markFields() {
  for (const message of document.querySelectorAll(".wrong")) {
    const field = document.getElementById(message.id.replace("wrong-", ""));
    field?.setAttribute("aria-invalid", String(message.childElementCount > 0));
  }
}
document.addEventListener("DOMContentLoaded", markFields);
document.addEventListener("htmx:afterSettle", markFields);
