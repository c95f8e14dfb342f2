// Pictures and videos for the next message: dropped on the form or pasted into it, and shown small; a video is a word.

export class Pictures {
  #shelf = null;

  // form: takes what is dropped and pasted.  shelf: shows what waits.
  constructor(form, shelf) {
    this.#shelf = shelf;
    form.addEventListener("dragover", (event) => event.preventDefault());
    form.addEventListener("drop", (event) => this.#read(event, event.dataTransfer.files));
    form.addEventListener("paste", (event) => this.#read(event, event.clipboardData.files));
  }

  // Returns the data URIs of what waits, which then waits no more.
  take() {
    const urls = [...this.#shelf.querySelectorAll("img")].map((img) => img.src);
    this.#shelf.replaceChildren();
    return urls;
  }

  add(url) {
    const button = Object.assign(document.createElement("button"), { type: "button", title: "Remove" });
    button.append(thumbnail(url));
    button.addEventListener("click", () => button.remove());
    this.#shelf.append(button);
  }

  #read(event, files) {
    const pictures = [...files].filter((file) => /^(image|video)\//.test(file.type));
    if (pictures.length || event.type === "drop") event.preventDefault();
    for (const file of pictures) {
      const reader = new FileReader();
      reader.addEventListener("load", () => this.add(reader.result));
      reader.readAsDataURL(file);
    }
  }
}

export function isVideo(url) {
  return url.startsWith("data:video/");
}

export function thumbnail(url) {
  const alt = isVideo(url) ? "Video" : "Picture";
  return Object.assign(document.createElement("img"), { src: url, alt, className: "thumbnail" });
}
