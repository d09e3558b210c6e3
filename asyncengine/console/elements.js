// Making elements. Whatever a model, a user or the server says only ever becomes a text node.

export const byId = (id) => document.getElementById(id);

export function make(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

export function button(text, onclick) {
  const made = make("button", "", text);
  made.type = "button";
  made.addEventListener("click", onclick);
  return made;
}

/** More text at the end of an element that holds nothing else. */
export function append(element, text) {
  if (element.lastChild) element.lastChild.appendData(text);
  else element.append(text);
}
