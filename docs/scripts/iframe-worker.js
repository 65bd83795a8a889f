// Browsers start no worker for a page that was opened from a folder, so the search of such a page runs in a hidden frame.
"use strict";

if (window.location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow, script = inside.document.createElement("script");
      // What runs there talks as a worker does: to whoever made it, and not to itself.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      script.src = new URL(url, document.baseURI).href;
      script.addEventListener("load", () => {
        this.inside = inside;
        this.waiting.forEach((data) => this.postMessage(data));
      });
      inside.document.body.append(script);
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
  };
}
