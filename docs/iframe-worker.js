// A page that is opened from the disk may start no worker: what searches runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>postMessage = said => parent.postMessage(said, "*")</script><script src="${address}"></script>`;
      this.loaded = new Promise(resolve => { frame.onload = () => resolve(frame.contentWindow); });
      addEventListener("message", event => {
        if (event.source === frame.contentWindow) { this.dispatchEvent(new MessageEvent("message", { data: event.data })); }
      });
      document.documentElement.append(frame);
    }
    postMessage(data) { this.loaded.then(inner => inner.dispatchEvent(new MessageEvent("message", { data }))); }
  };
}
