/** Records speech, and puts what the server's model hears into the message. Only where index.html says that it transcribes. */

import { transcribe } from "../api.js";
import { byId, h } from "../dom.js";

const RATE = 16_000; // samples a second, as Whisper takes them
const REFUSED = "The browser does not let the page use a microphone. Allow it for this page, then record again.";

export class Microphone {
  #recorder = null; // while it records
  #button = h("button", { id: "record", type: "button" });

  /** `on.heard(text)`: the text of a recording. `on.failed(reason)`: there is none; empty when a recording begins. */
  constructor(on) {
    this.on = on;
    // browsers give a microphone to pages of this machine, and over HTTPS
    if (!("transcribes" in document.body.dataset) || !navigator.mediaDevices) return;
    this.#show("●", "Record speech");
    this.#button.addEventListener("click", () => (this.#recorder ? this.#recorder.stop() : this.#record()));
    byId("attach").after(this.#button);
  }

  async #record() {
    this.on.failed("");
    this.#button.disabled = true; // until the reader has allowed it
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      this.#recorder = new MediaRecorder(stream);
      const pieces = [];
      this.#recorder.addEventListener("dataavailable", ({ data }) => pieces.push(data));
      this.#recorder.addEventListener("stop", () => {
        for (const track of stream.getTracks()) track.stop();
        this.#recorder = null;
        this.#send(new Blob(pieces));
      });
      this.#recorder.start();
      this.#show("■", "Stop recording");
    } catch {
      this.on.failed(REFUSED);
    }
    this.#button.disabled = false;
  }

  async #send(recording) {
    this.#show("…", "Record speech");
    this.#button.disabled = true;
    try {
      this.on.heard(await transcribe(await waveFile(recording)));
    } catch (error) {
      this.on.failed(error.message);
    }
    this.#button.disabled = false;
    this.#show("●", "Record speech");
  }

  #show(sign, name) {
    this.#button.textContent = sign;
    this.#button.title = name;
    this.#button.setAttribute("aria-label", name);
  }
}

/** A recording in the browser's own format as WAV, which every server reads: PCM of 16 bits, mono. */
async function waveFile(recording) {
  const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recording.arrayBuffer());
  const samples = sound.getChannelData(0);
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const write = (at, mark) => [...mark].forEach((each, index) => view.setUint8(at + index, each.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of this chunk
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes a second
  view.setUint16(32, 2, true); // bytes of a sample
  view.setUint16(34, 16, true); // bits
  write(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((each, index) => view.setInt16(44 + 2 * index, Math.max(-1, Math.min(1, each)) * 0x7fff, true));
  return new Blob([view], { type: "audio/wav" });
}
